"""What the dead left in Redis, and what nobody looks after. A check is a function: what is left in one fleet, and why.

A finding counts when two looks show it: between the reads of one look a job may move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prelay_queue.settings import QueueTimes
from prelay_queue.state import SWEPT_IN

from .facts import Facts
from .finding import Finding, State, ok, some
from .fleets import Fleet, Look, Looks
from .registry import Checks

#: What is due for so long is looked after by nobody: a sweep comes each second. Milliseconds.
LATE_MS = 30_000
#: An API process says every few seconds that it lives; one that is silent for so long is dead. Milliseconds.
SILENT_MS = 15_000
_TTL_MS = QueueTimes().api_ttl_s * 1000
_STATE_OF = {str(state): index for state, index in SWEPT_IN.items()}

checks = Checks("left in Redis")

#: From one fleet to what is left in it: ids, each with the reason.
Find = Callable[[Fleet], dict[str, str]]


@dataclass(frozen=True, slots=True)
class _Leftover:
    find: Find
    state: State
    advice: str

    def __call__(self, looks: Looks) -> Finding:
        """Judge what both looks show. PREFIX in the advice becomes that of the first fleet concerned."""
        first = _all(self.find, looks.first)
        both = {key: why for key, why in _all(self.find, looks.second).items() if key in first}
        if not both:
            return ok("none")
        several = len(looks.second.fleets) > 1
        items = [f"{fleet}: {why}" if several else why for (fleet, _), why in both.items()]
        fleet = next(f for f in looks.second.fleets if str(f) == next(iter(both))[0])
        return Finding(
            self.state, f"{len(items)}: {some(items)}", self.advice.replace("PREFIX", fleet.keys.prefix), tuple(items)
        )


def _all(find: Find, look: Look) -> dict[tuple[str, str], str]:
    return {(str(fleet), name): why for fleet in look.fleets for name, why in find(fleet).items()}


def _left(name: str, advice: str, state: State = State.WARN) -> Callable[[Find], Find]:
    def enter(find: Find) -> Find:
        checks.of(name, Facts.looks)(_Leftover(find, state, advice))
        return find

    return enter


@_left(
    "jobs in no index",
    "no sweep will find them: ZADD 'PREFIX<index>' 0 <id> hands one to the next sweep",
    State.FAIL,  # an accepted job is never lost: this one is
)
def jobs_in_no_index(fleet: Fleet) -> dict[str, str]:
    """Every job that is not over stands in the one index that its state belongs to."""
    found = {}
    for id_, job in fleet.jobs.items():
        index = _STATE_OF.get(job.state)
        if index is None and job.state != "done":
            found[id_] = f"{id_} (state {job.state!r} is unknown)"
        elif index is not None and id_ not in fleet.indices[index]:
            found[id_] = f"{id_} ({job.state}, not in {index})"
    return found


@_left("ended jobs that stay", "they hold memory for ever: DEL 'PREFIXjob:<id>' 'PREFIXlog:<id>'")
def ended_jobs_that_stay(fleet: Fleet) -> dict[str, str]:
    return {id_: id_ for id_, job in fleet.jobs.items() if job.state == "done" and job.ttl_ms == -1}


@_left(
    "index entries without job",
    "the next sweep of a worker or API process removes them; if none will run: ZREM 'PREFIX<index>' <id>",
)
def index_entries_without_job(fleet: Fleet) -> dict[str, str]:
    return {
        f"{index} {id_}": f"{id_} in {index} ({fleet.jobs[id_].state if id_ in fleet.jobs else 'no such job'})"
        for index, members in fleet.indices.items()
        for id_ in members
        if id_ not in fleet.jobs or _STATE_OF.get(fleet.jobs[id_].state) != index
    }


@_left(
    "work entries without job",
    "the next worker that reads one drops it; if none will run: XDEL '<stream>' <entry>",
)
def work_entries_without_job(fleet: Fleet) -> dict[str, str]:
    found = {}
    for stream, work in fleet.work.items():
        for entry, id_ in work.entries.items():
            job = fleet.jobs.get(id_)
            if job is None or (job.stream, job.entry) != (stream, entry):
                short = stream.removeprefix(fleet.keys.prefix)
                why = "no such job" if job is None else f"the job is {job.state} elsewhere"
                found[f"{stream} {entry}"] = f"{id_ or '?'} as {entry} in {short} ({why})"
    return found


@_left(
    "consumers of dead workers",
    "the next worker that starts takes over what is pending and removes them",
)
def consumers_of_dead_workers(fleet: Fleet) -> dict[str, str]:
    pending: dict[str, int] = {}
    for work in fleet.work.values():
        for name, count in work.consumers.items():
            if name not in fleet.workers:
                pending[name] = pending.get(name, 0) + count
    return {name: f"{name} ({count} pending)" for name, count in pending.items()}


@_left(
    "live streams of dead APIs",
    "one with a time to live goes by itself; one that stays for ever: DEL 'PREFIXlive:<api>'",
)
def live_streams_of_dead_apis(fleet: Fleet) -> dict[str, str]:
    found = {}
    for api, ttl_ms in fleet.live.items():
        if ttl_ms == -1:
            found[api] = f"{api} (stays for ever)"
        elif _TTL_MS - ttl_ms > SILENT_MS:
            found[api] = f"{api} (silent for {(_TTL_MS - ttl_ms) / 1000:.0f} s, goes in {ttl_ms / 1000:.0f} s)"
    return found


@_left(
    "deadlines without job",
    "each goes at its time, if any worker or API process runs; if none will: ZREM 'PREFIXdeadlines' <id>",
)
def deadlines_without_job(fleet: Fleet) -> dict[str, str]:
    return {
        id_: f"{id_} ({'over' if id_ in fleet.jobs else 'no such job'})"
        for id_ in fleet.deadlines
        if id_ not in fleet.jobs or fleet.jobs[id_].state == "done"
    }


@_left(
    "deadlines that nobody keeps",
    "only a worker that has the job will see that it is late: ZADD 'PREFIXdeadlines' <ms> <id>",
)
def deadlines_that_nobody_keeps(fleet: Fleet) -> dict[str, str]:
    return {
        id_: f"{id_} ({job.deadline_ms} ms)"
        for id_, job in fleet.jobs.items()
        if job.deadline_ms > 0 and job.state != "done" and id_ not in fleet.deadlines
    }


@_left(
    "counts of what waits",
    "requests may be refused too early or too late: DEL 'PREFIXwaiting' forgets them, and the next sweep counts again",
)
def counts_of_what_waits(fleet: Fleet) -> dict[str, str]:
    """Every job that waits for a prefill has its share in `waiting`, no other has, and the sums are of the shares."""
    shares = {name: share for name, share in fleet.waiting.items() if not name.startswith("#")}
    waits = {id_ for id_, job in fleet.jobs.items() if job.state == "queued"}
    found = {id_: f"{id_} (waits, not counted)" for id_ in waits - shares.keys()}
    for id_ in shares.keys() - waits:
        found[id_] = f"{id_} (counted, {fleet.jobs[id_].state if id_ in fleet.jobs else 'no such job'})"
    sums = _sums(shares.values())
    for name in sums.keys() | {name for name in fleet.waiting if name.startswith("#")}:
        stands, right = fleet.waiting.get(name, "0"), sums.get(name, 0)
        if stands != str(right):
            found[name] = f"{name[1:]} {stands} (the shares are {right})"
    return found


def _sums(shares: Iterable[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for share in shares:
        cls, _, tokens = share.partition(" ")
        found[f"#jobs:{cls}"] += 1
        found[f"#tokens:{cls}"] += int(tokens) if tokens.isdecimal() else 0
    return found


@_left("request keys that stay", "they answer for requests that nobody remembers: DEL 'PREFIXidem:<key>'")
def request_keys_that_stay(fleet: Fleet) -> dict[str, str]:
    return {key: key for key, ttl_ms in fleet.keyed.items() if ttl_ms == -1}


@_left(
    "batches in no index",
    "nobody will take them up: ZADD 'PREFIXbatches' 0 <id>",
    State.FAIL,  # an accepted batch is never lost: this one is
)
def batches_in_no_index(fleet: Fleet) -> dict[str, str]:
    return {
        id_: f"{id_} ({batch.status or 'no status'})"
        for id_, batch in fleet.batches.items()
        if not batch.over and id_ not in fleet.batch_index
    }


@_left(
    "batch entries without batch",
    "the next look of an API process for batches removes them; if none will run: ZREM 'PREFIXbatches' <id>",
)
def batch_entries_without_batch(fleet: Fleet) -> dict[str, str]:
    return {
        id_: f"{id_} ({fleet.batches[id_].status if id_ in fleet.batches else 'no such batch'})"
        for id_ in fleet.batch_index
        if id_ not in fleet.batches or fleet.batches[id_].over
    }


@_left("ended batches that stay", "what they were is on disk: DEL 'PREFIXbatch:<id>'")
def ended_batches_that_stay(fleet: Fleet) -> dict[str, str]:
    return {id_: id_ for id_, batch in fleet.batches.items() if batch.over and batch.ttl_ms == -1}


@_left(
    "batches that nobody runs",
    "do an API process and a batch worker run, with one --files-dir? Both together take them up within 20 s",
)
def batches_that_nobody_runs(fleet: Fleet) -> dict[str, str]:
    """Their runner is gone for long; or they wait for one while no batch of the fleet is run at all."""
    unfinished = {id_: batch for id_, batch in fleet.batches.items() if not batch.over}
    runs = any(batch.lease_ms > fleet.now_ms for batch in unfinished.values())
    found = {}
    for id_, batch in unfinished.items():
        late_ms = fleet.now_ms - (batch.lease_ms or batch.created_ms)
        if late_ms > LATE_MS and batch.lease_ms:
            found[id_] = f"{id_} (its runner was lost {late_ms / 1000:.0f} s ago)"
        elif late_ms > LATE_MS and not runs:
            found[id_] = f"{id_} (asked for {late_ms / 1000:.0f} s ago, nobody runs any)"
    return found


@_left("control streams that stay", "their workers are dead: DEL 'PREFIXctl:<worker>'")
def control_streams_that_stay(fleet: Fleet) -> dict[str, str]:
    return {name: name for name, ttl in fleet.control.items() if ttl == -1 and name not in fleet.workers}


@_left(
    "leases long expired",
    "nobody sweeps: does any worker or API process run? The first that does takes them up after 11 s",
)
def leases_long_expired(fleet: Fleet) -> dict[str, str]:
    """Also preempts that were never answered, which the same sweep takes up, and deadlines that ended nothing."""
    found = {}
    for id_, deadline_ms in fleet.deadlines.items():
        late_ms = fleet.now_ms - deadline_ms
        if late_ms > LATE_MS and id_ in fleet.jobs and fleet.jobs[id_].state != "done":
            found[f"deadlines {id_}"] = f"{id_} (its deadline passed {late_ms / 1000:.0f} s ago)"
    for index, what in (("leases", "lease ended"), ("preempted", "preempted")):
        for id_, score in fleet.indices[index].items():
            late_ms = fleet.now_ms - score
            if late_ms > LATE_MS:
                found[f"{index} {id_}"] = f"{id_} ({what} {late_ms / 1000:.0f} s ago)"
    return found


@_left(
    "dead letters",
    "these requests ended their worker each time: look for it in the workers' logs; `prelay dead` tries them again, or"
    " drops them",
)
def dead_letters(fleet: Fleet) -> dict[str, str]:
    return {id_: f"{id_} ({why})" for id_, why in fleet.dead.items()}
