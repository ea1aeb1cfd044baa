"""What counts as left over in Redis, on looks made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prelay.doctor import leftovers
from prelay.doctor.finding import Finding, State, ok
from prelay.doctor.fleets import Batch, Fleet, Job, Look, Looks, Work
from prelay_queue.keys import Keys

NOW = 1_000_000_000_000
STREAM = "prelay:{f.0}:work:prefill:normal:n"
WAITING = Job("queued", STREAM, "1-0", -1)
COUNTED = {"w/0": "normal 4", "#jobs:normal": "1", "#tokens:normal": "4"}
RUN = Batch("in_progress", NOW + 5_000, NOW - 90_000, -1)
CHECKS = {check.name: check.judge for check in leftovers.checks.checks}


def fleet(name: str = "f") -> Fleet:
    """A sound one: a job in each state, everything where it belongs, a live worker and API process, batches."""
    jobs = {"w/0": WAITING, "r/0": Job("decode", "", "", -1, NOW + 9_000), "p/0": Job("preempted", "", "", -1)}
    jobs["d/0"] = Job("done", "", "", 200_000)
    indices = {"queued": {"w/0": NOW - 3000.0}, "leases": {"r/0": NOW + 7000.0}, "preempted": {"p/0": NOW - 1000.0}}
    work = {STREAM: Work({"1-0": "w/0"}, {"worker-a": 0})}
    live, control = {"api-a": 28_000}, {"worker-a": 50_000}
    found = Fleet(Keys(name), NOW, jobs, indices, work, {"worker-a"}, live, control)
    found.deadlines, found.waiting, found.keyed = {"r/0": NOW + 9_000.0}, dict(COUNTED), {"key": 1_000}
    found.batches = {
        "run": RUN,
        "waits": Batch("validating", 0, NOW - 80_000, -1),
        "over": Batch("failed", 0, 1, 5_000),
    }
    found.batch_index = {"run": NOW - 90_000.0, "waits": NOW - 80_000.0}
    return found


def twice(*fleets: Fleet) -> Looks:
    return Looks(Look(fleets), Look(fleets))


@pytest.mark.parametrize("name", CHECKS)
def test_in_a_sound_fleet_nothing_is_left(name: str) -> None:
    assert CHECKS[name](twice(fleet())) == ok("none")


def lose_lease(found: Fleet) -> None:
    del found.indices["leases"]["r/0"]


def lose_queued(found: Fleet) -> None:
    del found.indices["queued"]["w/0"]


def stand_in_wrong_index(found: Fleet) -> None:
    found.indices["queued"]["r/0"] = found.indices["leases"].pop("r/0")


def lose_state(found: Fleet) -> None:
    found.jobs["x/0"] = Job("", "", "", -1)


def stay_for_ever(found: Fleet) -> None:
    found.jobs["d/0"] = replace(found.jobs["d/0"], ttl_ms=-1)


def index_nothing(found: Fleet) -> None:
    found.indices["preempted"]["x/0"] = NOW - 1000.0


def index_the_ended(found: Fleet) -> None:
    found.indices["leases"]["d/0"] = NOW + 1000.0


def queue_nothing(found: Fleet) -> None:
    found.work[STREAM].entries["2-0"] = "x/0"


def queue_twice(found: Fleet) -> None:
    found.work[STREAM].entries["2-0"] = "w/0"


def kill_worker(found: Fleet) -> None:
    found.workers.clear()
    found.work["prelay:{f.0}:work:prefill:batch:n"] = Work({}, {"worker-a": 2})


def kill_api(found: Fleet) -> None:
    found.live["api-a"] = 9_000


def keep_stream(found: Fleet) -> None:
    found.live["api-a"] = -1


def keep_control(found: Fleet) -> None:
    found.control["worker-b"] = -1


def expire(found: Fleet) -> None:
    found.indices["leases"]["r/0"] = NOW - 40_000.0


def never_answer(found: Fleet) -> None:
    found.indices["preempted"]["p/0"] = NOW - 31_000.0


def give_up(found: Fleet) -> None:
    found.dead["z/0"] = "2 crashes in company, 2 alone"


def wait_for_nothing(found: Fleet) -> None:
    found.deadlines["x/0"] = NOW - 40_000.0


def be_late_for_nothing(found: Fleet) -> None:
    found.deadlines["d/0"] = NOW + 40_000.0


def lose_deadline(found: Fleet) -> None:
    found.deadlines.clear()


def miss_deadline(found: Fleet) -> None:
    found.jobs["r/0"] = replace(found.jobs["r/0"], deadline_ms=NOW - 40_000)
    found.deadlines["r/0"] = NOW - 40_000.0


def lose_share(found: Fleet) -> None:
    del found.waiting["w/0"]
    found.waiting.pop("#jobs:normal")
    found.waiting.pop("#tokens:normal")


def count_what_runs(found: Fleet) -> None:
    found.waiting |= {"r/0": "batch 0", "#jobs:batch": "1"}


def count_nothing(found: Fleet) -> None:
    found.waiting |= {"x/0": "normal 1", "#jobs:normal": "2", "#tokens:normal": "5"}


def miscount(found: Fleet) -> None:
    found.waiting["#tokens:normal"] = "40"


def count_a_class_of_nobodys(found: Fleet) -> None:
    found.waiting["#jobs:batch"] = "-1"


def keep_key(found: Fleet) -> None:
    found.keyed["key"] = -1


def lose_batch(found: Fleet) -> None:
    del found.batch_index["run"]


def list_no_batch(found: Fleet) -> None:
    found.batch_index["x"] = 1.0


def list_ended_batch(found: Fleet) -> None:
    found.batch_index["over"] = 1.0


def keep_batch(found: Fleet) -> None:
    found.batches["over"] = replace(found.batches["over"], ttl_ms=-1)


def kill_runner(found: Fleet) -> None:
    found.batches["run"] = replace(RUN, lease_ms=NOW - 35_000)
    del found.batches["waits"], found.batch_index["waits"]


def have_no_runner(found: Fleet) -> None:
    del found.batches["run"], found.batch_index["run"]


Break = Callable[[Fleet], None]
BROKEN: list[tuple[Break, str, str]] = [
    (lose_lease, "jobs in no index", "r/0 (decode, not in leases)"),
    (lose_queued, "jobs in no index", "w/0 (queued, not in queued)"),
    (stand_in_wrong_index, "jobs in no index", "r/0 (decode, not in leases)"),
    (stand_in_wrong_index, "index entries without job", "r/0 in queued (decode)"),
    (lose_state, "jobs in no index", "x/0 (state '' is unknown)"),
    (stay_for_ever, "ended jobs that stay", "d/0"),
    (index_nothing, "index entries without job", "x/0 in preempted (no such job)"),
    (index_the_ended, "index entries without job", "d/0 in leases (done)"),
    (queue_nothing, "work entries without job", "x/0 as 2-0 in work:prefill:normal:n (no such job)"),
    (queue_twice, "work entries without job", "w/0 as 2-0 in work:prefill:normal:n (the job is queued elsewhere)"),
    (kill_worker, "consumers of dead workers", "worker-a (2 pending)"),
    (kill_api, "live streams of dead APIs", "api-a (silent for 21 s, goes in 9 s)"),
    (keep_stream, "live streams of dead APIs", "api-a (stays for ever)"),
    (keep_control, "control streams that stay", "worker-b"),
    (expire, "leases long expired", "r/0 (lease ended 40 s ago)"),
    (never_answer, "leases long expired", "p/0 (preempted 31 s ago)"),
    (wait_for_nothing, "deadlines without job", "x/0 (no such job)"),
    (be_late_for_nothing, "deadlines without job", "d/0 (over)"),
    (lose_deadline, "deadlines that nobody keeps", f"r/0 ({NOW + 9_000} ms)"),
    (miss_deadline, "leases long expired", "r/0 (its deadline passed 40 s ago)"),
    (lose_share, "counts of what waits", "w/0 (waits, not counted)"),
    (count_what_runs, "counts of what waits", "r/0 (counted, decode)"),
    (count_nothing, "counts of what waits", "x/0 (counted, no such job)"),
    (miscount, "counts of what waits", "tokens:normal 40 (the shares are 4)"),
    (count_a_class_of_nobodys, "counts of what waits", "jobs:batch -1 (the shares are 0)"),
    (keep_key, "request keys that stay", "key"),
    (lose_batch, "batches in no index", "run (in_progress)"),
    (list_no_batch, "batch entries without batch", "x (no such batch)"),
    (list_ended_batch, "batch entries without batch", "over (failed)"),
    (keep_batch, "ended batches that stay", "over"),
    (kill_runner, "batches that nobody runs", "run (its runner was lost 35 s ago)"),
    (have_no_runner, "batches that nobody runs", "waits (asked for 80 s ago, nobody runs any)"),
    (give_up, "dead letters", "z/0 (2 crashes in company, 2 alone)"),
]


@pytest.mark.parametrize(("damage", "name", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_left_is_named_with_what_to_do(damage: Break, name: str, words: str) -> None:
    found = fleet()
    damage(found)
    finding = CHECKS[name](twice(found))
    assert (finding.found, finding.items) == (f"1: {words}", (words,))
    assert finding.state is (State.FAIL if name.endswith("in no index") else State.WARN)
    assert finding.advice
    assert "PREFIX" not in finding.advice
    others = {n for d, n, _ in BROKEN if d is damage}
    assert [n for n in CHECKS if n not in others and CHECKS[n](twice(found)) != ok("none")] == [], "and nothing else"


@pytest.mark.parametrize(("damage", "name"), [(damage, name) for damage, name, _ in BROKEN])
def test_what_only_one_of_two_looks_shows_was_on_its_way(damage: Break, name: str) -> None:
    found = fleet()
    damage(found)
    for looks in (Looks(Look((found,)), Look((fleet(),))), Looks(Look((fleet(),)), Look((found,)))):
        assert CHECKS[name](looks) == ok("none")


def test_where_fleets_share_a_server_each_item_names_its_own() -> None:
    one, two = fleet("one"), fleet("two")
    lose_lease(two)
    finding: Finding = CHECKS["jobs in no index"](twice(one, two))
    assert finding.found == "1: two.0: r/0 (decode, not in leases)"
    assert "prelay:{two.0}:" in finding.advice


def test_many_are_counted_and_all_are_items() -> None:
    found = fleet()
    for number in range(10):
        found.dead[f"z{number}/0"] = "2 alone"
    finding = CHECKS["dead letters"](twice(found))
    assert finding.found == "10: z0/0 (2 alone), z1/0 (2 alone), z2/0 (2 alone) and 7 more"
    assert len(finding.items) == 10
