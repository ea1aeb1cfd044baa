"""The rules of the KV hand-over, each broken at its exact point between real workers on real segments.

A tiny random model, so every answer can be compared with what the model says alone: keys that were read too late, or
are another job's, give other tokens. What two processes do is here; the same rules inside one are in tests/unit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from prelay_kv.sweep import sweep
from prelay_worker.config import Role
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.bed.tiny import make_tiny_model
from tests.faults.fleet import Client
from tests.faults.forked import WorkerProcess
from tests.faults.nursed import Nursery, nursery
from tests.faults.tiny import BLOCK, Alone, TinyFleet, tiny_fleet

pytestmark = pytest.mark.timeout(120)

#: Of most jobs here: two full blocks and half of a third.
PROMPT = 2 * BLOCK + BLOCK // 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


@pytest.fixture(scope="module")
def forks(model: Path) -> Iterator[Nursery]:
    with nursery(model) as found:
        yield found


@pytest.fixture
def fleet(shared_server: Server, alone: Alone, forks: Nursery, model: Path) -> Iterator[TinyFleet]:
    with tiny_fleet(shared_server, alone, forks, model) as found:
        yield found


def pair(fleet: TinyFleet, fault: str, prefill: int = 64, decode: int = 64) -> tuple[WorkerProcess, WorkerProcess]:
    """A prefill and a decode worker with so many blocks; the decode worker has the fault."""
    workers = fleet.start(Role.PREFILL, blocks=prefill), fleet.start(Role.DECODE, fault, blocks=decode)
    fleet.until_ready()
    return workers


def submit(fleet: TinyFleet, prompt: int = PROMPT, max_tokens: int = 8) -> Client:
    return fleet.submit(1, prompt=prompt, max_tokens=max_tokens)[0]


def told_to_release(fleet: TinyFleet, worker: WorkerProcess, client: Client) -> None:
    """The exporter lets go too early: a release that nobody should have sent."""
    fleet.redis.xadd(fleet.keys.control(worker.id), {"c": orjson.dumps({"op": "release", "id": client.id, "ep": 1})})


def epoch(fleet: TinyFleet, client: Client) -> int:
    return fleet.view(client).epoch


# --- the job is taken away in the middle of its copy


def cancelled(fleet: TinyFleet, decode: WorkerProcess, client: Client) -> Client:
    """Its client left; another one's job comes."""
    assert fleet.queue.run(fleet.queue.scripts.cancel(client.id)) == "ended"
    following = submit(fleet)
    fleet.clients.remove(client)  # it has no answer
    return following


def preempted(fleet: TinyFleet, decode: WorkerProcess, client: Client) -> Client:
    """An operator asked for it; its next attempt comes."""
    fleet.queue.run(fleet.queue.scripts.evict(client.id))
    return client


def fenced(fleet: TinyFleet, decode: WorkerProcess, client: Client) -> Client:
    """The fleet takes the worker for dead and gives its jobs to others, while it lives: its next attempt comes."""

    def over() -> bool:  # its next renewal may come before the sweep
        fleet.queue.run(fleet.queue.scripts.disown(decode.id))
        return epoch(fleet, client) > 1

    until(over, every_s=0.05)
    return client


@pytest.mark.parametrize("lose", [cancelled, preempted, fenced])
def test_blocks_stay_copying_until_the_copy_has_ended_whoever_has_the_job_by_then(
    fleet: TinyFleet, lose: Callable[[TinyFleet, WorkerProcess, Client], Client]
) -> None:
    """A mid-copy fence. The pool holds one attempt: the next waits for the copy of the one that is over."""
    _, decode = pair(fleet, "copy.middle=pause:4", decode=4)
    first = submit(fleet)
    until(lambda: decode.struck("copy.middle"), every_s=0.005)
    second = lose(fleet, decode, first)
    attempt = 2 if second is first else 1
    until(lambda: fleet.state(second) == "adopting" and epoch(fleet, second) >= attempt)
    kv = fleet.beat(decode)["kv"]
    assert (kv["copying"], kv["free"]) == (3, 1)
    assert fleet.state(second) in ("staged", "adopting"), "it began in blocks that are copied into"
    fleet.finish()


# --- the blocks are reused


@pytest.mark.parametrize("prompt", [PROMPT, 3 * BLOCK], ids=["the last block is not full", "all are cached"])
def test_blocks_that_are_handed_out_in_the_middle_of_a_copy_send_the_job_back(fleet: TinyFleet, prompt: int) -> None:
    """A generation bump during the copy: half of what was copied is another prompt's, and nobody decodes it."""
    prefill, decode = pair(fleet, "copy.middle=pause:2", prefill=4)
    first = submit(fleet, prompt)
    until(lambda: decode.struck("copy.middle"), every_s=0.005)
    told_to_release(fleet, prefill, first)
    second = submit(fleet, 3 * BLOCK + 8)  # all four blocks
    until(lambda: fleet.view(second).ids)
    assert fleet.state(first) == "adopting", "the copy was not slow enough"
    fleet.finish()
    assert (epoch(fleet, first), epoch(fleet, second)) == (2, 1)


def test_shared_blocks_that_an_importer_copies_are_not_evicted_when_their_other_holder_goes(fleet: TinyFleet) -> None:
    """A shared prefix block under memory pressure: as long as an export holds it, everything else goes first."""
    prefill, decode = pair(fleet, "copy.middle=pause:3", prefill=8)
    first = submit(fleet)
    until(lambda: decode.struck("copy.middle"), every_s=0.005)
    begins_alike = (*first.job.spec.prompt_ids[: 2 * BLOCK], *range(200, 208))
    fleet.submit(1, prompt_ids=begins_alike, max_tokens=8)
    fleet.until_done(clients=fleet.clients[1:])
    assert fleet.beat(prefill)["prefix_hits"] == 2 * BLOCK
    for _ in range(2):  # whatever is cached has to make room for the second of these
        submit(fleet, 5 * BLOCK)
        fleet.until_done(clients=fleet.clients[1:])
    assert fleet.state(first) == "adopting", "the copy was not slow enough"
    fleet.finish()
    assert epoch(fleet, first) == 1


# --- the exporter dies


def names_in(worker: WorkerProcess, segments: list[str]) -> list[str]:
    """Those of these segments that the process has mapped."""
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    return [name for name in segments if name in maps]


@pytest.mark.parametrize("swept", [True, False], ids=["and is swept", "and leaves its segment"])
def test_an_exporter_that_dies_before_its_memory_is_mapped(fleet: TinyFleet, swept: bool) -> None:
    """Where its segment is gone the job goes back to its first step; one that lies there still is as good as ever."""
    prefill, decode = pair(fleet, "claim.after=pause:0.7")
    first = submit(fleet)
    until(lambda: decode.struck("claim.after"), every_s=0.005)
    segments = fleet.segments()
    assert len(segments) == 1
    assert not names_in(decode, segments)
    prefill.kill()
    if swept:
        assert set(segments) <= set(sweep())
    else:
        until(lambda: fleet.state(first) in ("decode", "done"))
    fleet.finish()
    assert epoch(fleet, first) == (2 if swept else 1)
    assert prefill in fleet.ended


def test_an_exporter_that_dies_in_the_middle_of_a_copy_leaves_it_whole_and_is_unmapped_after(fleet: TinyFleet) -> None:
    """Its file is swept and the fleet knows that it is dead, all while the copy stands: the mapping stays as long."""
    prefill, decode = pair(fleet, "copy.middle=pause:3")
    first = submit(fleet, max_tokens=200)
    until(lambda: decode.struck("copy.middle"), every_s=0.005)
    segments = fleet.segments()
    assert names_in(decode, segments) == segments != []
    prefill.kill()
    assert set(segments) <= set(sweep())
    fleet.queue.run(fleet.queue.scripts.disown(prefill.id))  # as its supervisor does
    until(lambda: "unmapping the KV of dead worker" in decode.log)
    assert fleet.state(first) == "adopting", "the copy was not slow enough"
    assert names_in(decode, segments) == segments
    until(lambda: fleet.state(first) in ("decode", "done"))
    until(lambda: not names_in(decode, segments))
    fleet.finish()
    assert epoch(fleet, first) == 1


# --- nobody tells the exporter


def test_an_exporter_that_never_hears_of_the_adoption_finds_out_when_it_renews(fleet: TinyFleet) -> None:
    """A lost release: its worker is frozen and has no control stream at that moment, so nothing is written down."""
    prefill, decode = pair(fleet, "adopt.before=pause:0.6")
    first = submit(fleet, max_tokens=200)
    until(lambda: decode.struck("adopt.before"), every_s=0.005)
    prefill.send(signal.SIGSTOP)
    until(lambda: prefill.frozen)
    control = fleet.keys.control(prefill.id)
    assert fleet.redis.delete(control) == 1
    assert fleet.state(first) == "adopting"
    until(lambda: fleet.state(first) in ("decode", "done"), every_s=0.005)
    assert not fleet.redis.exists(control), "the release is there"
    prefill.send(signal.SIGCONT)
    until(lambda: fleet.beat(prefill)["kv"]["leased"] == 0, 10)
    fleet.finish()
    assert epoch(fleet, first) == 1
    assert prefill in fleet.workers


# --- workers that do not fit together


def test_a_decode_worker_of_another_layout_ends_the_job_with_an_error_and_holds_nothing(fleet: TinyFleet) -> None:
    fleet.start(Role.PREFILL)
    odd = fleet.start(Role.DECODE, block_size=2 * BLOCK)
    fleet.until_ready()
    refused = submit(fleet)
    until(lambda: fleet.state(refused) == "done")
    view = fleet.view(refused)
    assert (view.reason, view.epoch) == ("error", 1), view
    error = orjson.loads(view.error)
    assert error["code"] == "kv_handover_failed"
    assert "layout" in error["message"]
    assert view.ids == fleet.alone.answer(refused.job.spec)[:1], "what the prefill said stands"
    fleet.until_free()
    fleet.workers.remove(odd)
    fleet.ended.append(odd)
    assert odd.stop() == 0
    fleet.start(Role.DECODE)
    submit(fleet)
    fleet.clients.remove(refused)
    fleet.finish()


def test_workers_of_different_numerics_serve_each_other_and_say_so(fleet: TinyFleet) -> None:
    """Their KV fits, so the job is served. That every bit is what one of them would have computed nobody promises."""
    prefill, decode = fleet.start(Role.PREFILL), fleet.start(Role.DECODE, kernels="torch")
    fleet.until_ready()
    one, other = fleet.beat(prefill), fleet.beat(decode)
    assert one["numerics"] != other["numerics"]
    assert one["layout"] == other["layout"]
    fleet.exact = False
    client = submit(fleet, max_tokens=40)
    fleet.finish()
    assert epoch(fleet, client) == 1


# --- neighbours


def test_a_slow_copy_costs_the_neighbours_no_step(fleet: TinyFleet) -> None:
    """Copies have threads of their own: while one stands, those that decode go on, token by token."""
    _, decode = pair(fleet, "copy.middle=pause:3@2")
    neighbour = submit(fleet, max_tokens=400)
    until(lambda: fleet.view(neighbour).ids)
    joining = submit(fleet)
    until(lambda: decode.struck("copy.middle"), every_s=0.005)
    before = len(fleet.view(neighbour).ids)
    until(lambda: len(fleet.view(neighbour).ids) >= before + 50)
    assert fleet.state(joining) == "adopting", "they waited for the copy"
    fleet.finish()
    assert epoch(fleet, joining) == epoch(fleet, neighbour) == 1
