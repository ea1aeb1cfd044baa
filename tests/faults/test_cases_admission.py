"""Public faults of overload, as tests."""

from __future__ import annotations

from dataclasses import replace

from prelay_worker.config import NullModel, Role
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.burst import Burst
from tests.faults.crowd import Site, site

PLACES = 20
GUESTS = 10 * PLACES


def overloaded(here: Site, guests: int, max_tokens: int = 25) -> tuple[Burst, int, int]:
    """Two API processes with few places; the burst, and the most that ever waited and Redis ever held, bytes."""
    here.settings = replace(here.settings, max_queued_jobs={"normal": PLACES})
    here.serve(Role.PREFILL, blocks=64)
    here.serve(Role.DECODE, blocks=512, max_running=4)
    apis = [here.api(), here.api()]
    used = int(here.redis.info("memory")["used_memory"])
    burst = Burst([api.url for api in apis], guests, max_tokens)
    most, peak = 0, used

    def look() -> bool:
        nonlocal most, peak
        most = max(most, here.redis.zcard(here.keys.queued))
        peak = max(peak, int(here.redis.info("memory")["used_memory"]))
        return burst.done

    until(look, 90)
    return burst, most, peak - used


def test_of_a_burst_of_ten_times_what_may_wait_all_that_is_taken_ends_and_the_rest_comes_back(
    shared_server: Server,
) -> None:
    """vllm#18826: under a burst the server queues without a bound, and everything times out.

    Here no more than may wait ever waits, whichever process is asked; memory stays bounded; every request that was
    taken ends; those that were not are told when to come back, are let in then, and end too.
    """
    with site(shared_server, null=NullModel(step_ms=10)) as here:
        burst, most, grown = overloaded(here, GUESTS)
        burst.check()
        report = burst.report()
        print(report)
        assert 0 < most <= PLACES
        assert report["refused"] > PLACES
        assert report["refusals_median"] <= 6
        assert grown < 32 * 2**20
        here.check_nothing_left()


def test_while_nobody_works_the_refused_are_told_longer_and_longer_and_in_the_end_all_are_let_in(
    shared_server: Server,
) -> None:
    """The whole fleet is gone for a while: promises of a moment would bring everybody back again and again."""
    with site(shared_server, null=NullModel(step_ms=5)) as here:
        here.settings = replace(here.settings, max_queued_jobs={"normal": 5})
        api = here.start_api()
        until(lambda: api.url, 20)
        burst = Burst([api.url], 12, 10)
        until(lambda: any(promised_s >= 4 for guest in burst.guests for _, promised_s in guest.refused), 40)
        told = [promised_s for guest in burst.guests for _, promised_s in guest.refused]
        assert min(told) == 2
        here.serve(Role.UNIFIED)
        until(lambda: burst.done, 60)
        burst.check()
        here.check_nothing_left()
