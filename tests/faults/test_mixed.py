"""Fleets in which all kinds of workers serve together: what one of any kind loses, the others go on with."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prelay_queue.scripts import text
from prelay_worker.config import Role
from tests.bed.bound import bound
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Site, restarted, site
from tests.faults.forked import WorkerProcess

ROLES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)


def owned_by(here: Site, worker: WorkerProcess) -> set[str]:
    """The requests of which a worker runs a job. What waits for a decode worker is not run by anybody."""
    jobs = [text(job) for job in here.redis.zrange(here.keys.leases, 0, -1)]
    found = {job: here.redis.hmget(here.keys.job(job), "ow", "st") for job in jobs}
    theirs = [job for job, (owner, state) in found.items() if text(owner or "") == worker.id and state != b"staged"]
    return {job.partition("/")[0] for job in theirs}


def freeze_at_work(here: Site, worker: WorkerProcess, more: Callable[[], Any]) -> set[str]:
    """Stop a worker while it runs something; what that is. `more` gives work, of which others may take all."""

    def caught() -> set[str]:
        if not owned_by(here, worker):
            return set()
        worker.send(signal.SIGSTOP)
        until(lambda: worker.frozen, every_s=0.001)
        if not (jobs := owned_by(here, worker)):  # it had just ended
            worker.send(signal.SIGCONT)
        return jobs

    for _ in range(5):
        more()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if found := caught():
                return found
            time.sleep(0.002)
    raise AssertionError(f"{worker.id} never ran anything")


@pytest.mark.parametrize("order", [ROLES, ROLES[::-1]], ids=["prefill first", "unified first"])
def test_one_of_each_kind_is_killed_at_work_and_every_stream_goes_on(
    shared_server: Server, order: tuple[Role, ...]
) -> None:
    """All streams are right to their ends, and what the killed ones ran was begun again."""
    with site(shared_server, null=replace(DIVERGENT, prefill_ms_per_token=10)) as here:
        here.serve(*ROLES, blocks=2048)
        victims = {worker.config.role: worker for worker in here.workers}
        api = here.api()
        lost: set[str] = set()
        for role in order:
            hit = freeze_at_work(
                here, victims[role], lambda: here.crowd(api, 10, max_tokens=120, first=100 * len(here.crowds))
            )
            victims[role].kill()
            lost |= hit
            here.tend()
            until(bound(lambda count: len(here.status()) == count, len(ROLES)), 20)
        streams = here.check_crowds()
        assert len(streams) == 10 * len(here.crowds)
        assert len(here.ended) == len(ROLES)
        begun_again = {str(found.id) for found in streams if restarted(found)}
        assert lost <= begun_again


def test_what_a_pair_and_a_unified_worker_lose_together_the_others_of_each_kind_finish(shared_server: Server) -> None:
    """A whole pair and a unified worker die at once, and nobody is put in their places."""
    with site(shared_server, null=replace(DIVERGENT, prefill_ms_per_token=4)) as here:
        here.serve(*ROLES, *ROLES, blocks=2048)
        doomed = here.workers[:3]
        api = here.api()
        crowd = here.crowd(api, 24, max_tokens=150)
        crowd.until_streaming(12)
        for worker in doomed:
            worker.kill()
        here.workers = here.workers[3:]
        here.ended += doomed
        streams = here.check_crowds()
        assert len(streams) == 24
        assert any(map(restarted, streams)), "the kills hit nobody"
