"""Public faults of clients that leave, as tests: in every phase, in crowds, beside others, and coming back at once."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.chain import Stream, stream
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import Crowd, Site, body, site
from tests.faults.jobs import ends, jobs, running
from tests.faults.traffic import COMPLETIONS


class Leavers(Crowd):
    """Clients that close their sockets when they are told to. `length` is that of their prompts."""

    def __init__(self, url: str, count: int, max_tokens: int = 400, first: int = 0, length: int = 6) -> None:
        self._length = length
        self._leave: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(url, count, max_tokens, first, divergent=False)

    async def _read(self, url: str) -> list[BaseException | Stream]:
        self.prompts = [[prompt[0], *(n % 900 for n in range(self._length - 1))] for prompt in self.prompts]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, verify=False, timeout=90, limits=limits) as client:
            pairs = zip(self.prompts, self.streams, strict=True)
            asked = [stream(client, COMPLETIONS, body(prompt, self.max_tokens), found) for prompt, found in pairs]
            tasks = [asyncio.create_task(each) for each in asked]
            self._leave, self._loop = asyncio.Event(), asyncio.get_running_loop()
            leaving = asyncio.create_task(self._leave.wait())
            everyone = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait((everyone, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, leaving):
                task.cancel()
            return await everyone

    def leave(self) -> None:
        """Close all sockets; return when that is done. What was heard until then is right."""
        until(lambda: self._leave)
        assert self._loop is not None
        assert self._leave is not None
        self._loop.call_soon_threadsafe(self._leave.set)
        self.outcomes()
        self.close()
        self.check_prefixes()


def job_of(crowd: Crowd) -> str:
    """The job of its only client, who has heard of it."""
    return f"{crowd.streams[0].headers['x-request-id']}/0"


def until_all_over(here: Site, timeout_s: float = 30) -> None:
    until(lambda: not running(here), timeout_s)


def check_probe(here: Site, url: str) -> None:
    """The next request is served, and then nothing is left."""
    crowd = Crowd(url, 1, max_tokens=20, first=999, divergent=False)
    here.crowds.append(crowd)
    here.check_crowds(20)
    here.check_nothing_left()


# --- in every phase

#: Who is frozen so that jobs stay in the phase.
KEEPER = {"queued": Role.PREFILL, "staged": Role.DECODE}


def close_in(here: Site, url: str, phase: str, count: int, first: int) -> int:
    """One crowd whose clients leave when their jobs are in this phase; how many were."""
    keepers = [worker for worker in here.workers if worker.role == KEEPER.get(phase)]
    for worker in keepers:
        worker.send(signal.SIGSTOP)
    # Where nobody is frozen jobs go on, so they may never be in the phase all together.
    enough = count if keepers else count // 4
    leavers = Leavers(url, count, first=first)
    until(lambda: running(here)[phase] >= enough, 30, every_s=0.005)
    hit = running(here)[phase]
    leavers.leave()
    until_all_over(here)
    for worker in keepers:
        worker.send(signal.SIGCONT)
    return hit


@pytest.mark.timeout(240)
@pytest.mark.parametrize("times", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_clients_that_close_in_every_phase_leave_all_pools_free(shared_server: Server, times: int) -> None:
    """Case 10, vllm#50425: requests aborted while they wait for, or between, the two stages keep their blocks.

    So many in each phase: queued, in prefill, staged between hand-over and claim, in decode.
    """
    crowd = min(times, 40)
    with site(shared_server, null=NullModel(step_ms=10, prefill_ms_per_token=8)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=8192, max_running=64)
        api = here.api()
        pids, asked = here.pids(), 0
        for phase in ("queued", "prefill", "staged", "decode"):
            left = times
            while left > 0:
                left -= close_in(here, api.url, phase, crowd, first=asked % 900)
                asked += crowd
        here.until_free()
        assert ends(here) == {"cancelled": asked}
        check_probe(here, api.url)
        assert [worker.pid for worker in here.processes] == pids


# --- in crowds


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("count", "rounds"), [(30, 2), pytest.param(300, 4, marks=pytest.mark.slow)])
def test_hundreds_of_long_prompts_cancelled_together_leave_all_pools_free(
    shared_server: Server, count: int, rounds: int
) -> None:
    """Case 11, TensorRT-LLM#12313: after many cancelled long prompts the pools stay full, and all requests hang."""
    with site(shared_server, null=NullModel(step_ms=10, prefill_ms_per_token=0.01)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=3000)  # of each, eleven prompts
        api = here.api()
        pids = here.pids()
        for round_ in range(rounds):
            phase, enough = (("queued", count // 2), ("decode", 4), ("staged", 2), ("prefill", 1))[round_ % 4]
            leavers = Leavers(api.url, count, first=count * round_ % 700, length=1000)
            until(bound(lambda phase, enough: running(here)[phase] >= enough, phase, enough), 60, every_s=0.005)
            leavers.leave()
            until_all_over(here, 60)
        here.until_free()
        assert set(ends(here)) == {"cancelled"}
        check_probe(here, api.url)
        assert [worker.pid for worker in here.processes] == pids


# --- beside others


def test_a_huge_prompt_closed_in_its_prefill_disturbs_none_of_four_streams(shared_server: Server) -> None:
    """Case 12, sglang#39216: closing a huge prompt in the middle of its prefill ends the server, and all streams."""
    with site(shared_server, null=NullModel(step_ms=10, prefill_ms_per_token=0.5)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=1024)
        api = here.api()
        pids = here.pids()
        here.crowd(api, 4, max_tokens=200).until_streaming(4)
        huge = Leavers(api.url, 1, max_tokens=10, first=500, length=3_000)
        until(lambda: running(here)["prefill"], every_s=0.002)
        huge.leave()
        until(lambda: "prefill" not in running(here))
        assert running(here) == {"decode": 4}, "the streams should still run"
        assert len(here.check_crowds()) == 4
        assert huge.streams[0].frames == []
        assert ends(here) == {"length": 4, "cancelled": 1}
        check_probe(here, api.url)
        assert [worker.pid for worker in here.processes] == pids


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.UNIFIED,)], ids=["two workers", "one worker"])
def test_a_request_closed_while_it_waits_for_the_only_slot_costs_its_followers_nothing(
    shared_server: Server, roles: tuple[Role, ...]
) -> None:
    """Case 13, llama.cpp#13262: the server generates for clients that left while they waited (ik_llama.cpp#1929).

    A runs, B waits and is closed, C waits: C starts when A ends, and no step was made for B. Where the stages are two
    workers, each has one slot, and B may have its first token from the prefill.
    """
    with site(shared_server, null=NullModel(step_ms=10)) as here:
        here.serve(*roles, max_running=1)
        api = here.api()
        a = here.crowd(api, 1, max_tokens=150)
        a.until_streaming(1)
        b = Leavers(api.url, 1, max_tokens=400, first=100)
        until(lambda: b.streams[0].headers)
        job = job_of(b)
        b.leave()
        until(lambda: jobs(here)[job]["st"] == "done")
        c = here.crowd(api, 1, max_tokens=50, first=200)
        until(lambda: sum(running(here).values()) == 2)
        assert not a.done, "the slot was free"
        here.check_crowds()
        split = len(roles) == 2
        ended, begun = a.streams[0].frames[-1].at, c.streams[0].frames[1 if split else 0].at
        assert -0.05 < begun - ended < 2.0  # B would have taken four seconds
        log = here.read(job)
        assert log is not None
        assert log.reason == "cancelled"
        assert len(log.ids) <= (1 if split else 0)
        here.until_free()
        (steps,) = [beat for beat in here.status() if beat["role"] != Role.PREFILL]
        assert steps["computed_tokens"] == 149 + 49 + (0 if split else 6 + 6)
        here.check_nothing_left()


# --- around the hand-over

SWEEP_S = 0.2


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_an_abort_at_any_moment_around_the_hand_over_costs_no_worker_and_no_block(
    shared_server: Server, times: int
) -> None:
    """Case 14, vllm#43226: an abort while the KV travels ends the decode worker, or its blocks are never freed.

    From 0 to 200 ms after its claim, of which the prefill takes some 50.
    """
    with site(shared_server, null=NullModel(step_ms=5, prefill_ms_per_token=8)) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api()
        pids, emitted = here.pids(), []
        for n in range(times):
            leavers = Leavers(api.url, 1, first=n)
            until(bound(lambda found: found.headers, leavers.streams[0]), every_s=0.001)
            job = job_of(leavers)
            until(lambda: running(here).keys() - {"queued"}, every_s=0.001)
            leave_at = time.monotonic() + SWEEP_S * n / (times - 1)
            until(bound(lambda moment: time.monotonic() >= moment, leave_at), every_s=0.001)
            leavers.leave()
            until_all_over(here)
            emitted.append(int(jobs(here)[job]["nx"]))
        here.until_free()
        assert ends(here) == {"cancelled": times}
        assert min(emitted) == 0, "none was aborted before its hand-over"
        assert max(emitted) > 1, "none was aborted after its hand-over"
        check_probe(here, api.url)
        assert [worker.pid for worker in here.processes] == pids


# --- the same prompt again

AGAIN_S = 0.06


def test_a_prompt_sent_again_just_after_it_was_cancelled_gets_its_own_answer(shared_server: Server) -> None:
    """Case 17, vllm#39146: blocks of a cancelled request are given to others while its copy still goes on.

    Each token is a hash of all before it, so a word of somebody else's answer would stand out.
    """
    with site(shared_server, null=NullModel(step_ms=6)) as here:
        here.start(Role.PREFILL, blocks=512)
        here.start(Role.DECODE, "copy.before=pause:0.03@*", blocks=60)  # little, so that blocks change hands
        here.until_ready()
        api = here.api()
        for n in range(8):
            here.crowd(api, 3, max_tokens=60, first=3 * n)
            leavers = Leavers(api.url, 1, max_tokens=100, first=500 + n)
            until(bound(lambda found: len(found.frames) >= 1, leavers.streams[0]), 30, every_s=0.002)
            leavers.leave()
            again_at = time.monotonic() + AGAIN_S
            until(bound(lambda moment: time.monotonic() >= moment, again_at), every_s=0.002)
            again = Crowd(api.url, 1, max_tokens=40, first=500 + n, divergent=False)
            assert leavers.prompts == again.prompts
            here.crowds.append(again)
        here.check_crowds(90)
        here.check_nothing_left()
