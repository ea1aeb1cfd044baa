"""Contracts of submit and claim,."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueError, QueueFull, SentBefore
from prelay_queue.events import EndedEvent
from prelay_queue.job import JobSpec, Priority
from prelay_queue.scripts import Claimed, NewJob
from prelay_queue.state import State
from tests.bed.servers import Server
from tests.integration.queue_desk import API, D1, D2, DOMAIN, JOB, LEASE_MS, P1, P2, Desk, ServerDesk, new_job

# submit


def test_a_submitted_job_waits_in_the_stream_of_its_class(desk: Desk) -> None:
    assert desk.submit(new_job(priority=Priority.BATCH)) == ("new",)
    assert desk.waiting() == {"work:prefill:batch:n": [JOB]}
    fields = desk.fields()
    assert (fields["st"], fields["ep"], fields["nx"], fields["ow"]) == ("queued", "1", "0", "")
    assert (fields["pt"], fields["mt"], fields["at"]) == ("4", "16", f"{API}#1")
    assert abs(int(fields["sub"]) - desk.now_ms()) < 5_000


def test_the_entry_says_how_many_tokens_to_compute_and_that_the_job_may_have_neighbours(desk: Desk) -> None:
    desk.submit()
    ((_, data),) = desk.entries(desk.keys.work("prefill")[3])
    assert data == {"id": JOB, "tok": "4", "al": "0"}


def test_all_choices_of_a_request_are_submitted_in_one_call(desk: Desk) -> None:
    assert desk.submit(*(new_job(f"r/{i}", choices=3) for i in range(3))) == ("new",) * 3
    assert desk.waiting() == {"work:prefill:normal:n": ["r/0", "r/1", "r/2"]}


def test_a_second_submit_changes_nothing(desk: Desk) -> None:
    desk.submit(new_job("r/0"), new_job("r/1"))
    before = desk.look()
    assert desk.submit(new_job("r/0"), new_job("r/1")) == ("exists", "exists")
    assert desk.look() == before


def test_a_submit_of_some_known_choices_adds_only_the_others(desk: Desk) -> None:
    desk.submit(new_job("r/0"))
    assert desk.submit(new_job("r/0"), new_job("r/1")) == ("exists", "new")


@pytest.mark.parametrize("state", [s for s in State if s is not State.QUEUED])
def test_a_submit_after_the_job_went_on_changes_nothing(desk: Desk, state: State) -> None:
    desk.to(state)
    before = desk.look()
    assert desk.submit() == ("exists",)
    assert desk.look() == before


def test_a_job_that_redis_lost_is_rebuilt_at_its_epoch_with_its_tokens(desk: Desk) -> None:
    desk.submit(replace(new_job(), epoch=4, ids=(7, 8)))
    assert desk.waiting() == {"work:prefill:normal:r": [JOB]}
    assert desk.log() == [("4-0", {"t": "7"}), ("4-1", {"t": "8"})]
    assert desk.view().resume == 2
    claim = desk.claim(P1).claim
    assert claim is not None
    assert (claim.epoch, claim.ids) == (4, (7, 8))
    assert desk.handoff(epoch=3) == "fenced"
    assert desk.handoff(epoch=4, seq=2) == "ok"


def test_a_rebuilt_job_that_has_all_its_tokens_ends_instead_of_running(desk: Desk) -> None:
    desk.listen(API)
    desk.submit(replace(new_job(max_tokens=2), epoch=3, ids=(7, 8)))
    view = desk.view()
    assert (view.state, view.reason, view.ids) == ("done", "length", (7, 8))
    assert desk.waiting() == {}
    assert desk.heard() == [EndedEvent(JOB, 3, 2, "length")]


def test_a_full_server_refuses_a_submit_whole(desk: Desk) -> None:
    before = desk.look()
    with desk.backend.full(), pytest.raises(QueueFull):
        desk.submit(new_job("r/0"), new_job("r/1"))
    assert desk.look() == before


def test_a_full_server_drains_what_it_has(desk: Desk) -> None:
    for i in range(4):
        desk.submit(new_job(f"r/{i}"))
    desk.listen(API)
    desk.mind(P1, D1)
    with desk.backend.full():
        for i in range(4):
            job = f"r/{i}"
            assert desk.claim(P1).code == "ok"
            assert desk.handoff(job=job) == "ok"
            assert desk.claim(D1, f"decode:{DOMAIN}").code == "ok"
            assert desk.adopt(job=job) == "ok"
            assert desk.emit(1, (8, 9), job=job).code == "ok"
            assert desk.renew(D1, job=job) == "kept"
        assert desk.finish(3, (10,), job="r/0") == "ok"
        assert desk.cancel(job="r/1") == "ended"
        assert desk.preempt(job="r/2") == "ok"
        assert desk.requeue(1, f"{API}#1", job="r/2").code == "ok"
        assert desk.crash("r/3").reaped == ("r/3",)
    assert {desk.fields(f"r/{i}")["st"] for i in (2, 3)} == {"queued"}


# claim


def test_a_claim_hands_the_job_to_its_owner_with_a_lease(desk: Desk) -> None:
    job = new_job(prompt=(5, 6, 7), ttl_ms=100_000)
    desk.submit(job)
    answer = desk.claim(P1)
    assert answer.claim is not None
    assert answer.claim.spec == job.spec
    assert (answer.claim.epoch, answer.claim.ids, answer.claim.kv) == (1, (), b"")
    assert (answer.claim.preemptions, answer.claim.alone) == (0, False)
    assert answer.claim.deadline_ms - answer.claim.submitted_ms == pytest.approx(100_000, abs=1_000)
    assert (desk.fields()["st"], desk.fields()["ow"]) == ("prefill", P1)
    assert 0 < desk.lease_left_ms() <= LEASE_MS


def test_a_claim_takes_the_entry_out_of_the_stream_and_out_of_the_group(desk: Desk) -> None:
    desk.to(State.PREFILL)
    stream = desk.keys.work("prefill")[3]
    assert len(desk.entries(stream)) == 0
    assert desk.pending(stream) == {}


def test_a_decode_claim_carries_the_reference_and_the_tokens(desk: Desk) -> None:
    claim = desk.to(State.ADOPTING)
    assert (claim.kv, claim.ids, claim.epoch) == (b"kv of r/0@1", (7,), 1)
    assert (desk.fields()["st"], desk.fields()["ow"]) == ("adopting", D1)


def test_a_repeated_claim_gives_the_same_job_again_and_changes_nothing(desk: Desk) -> None:
    desk.submit()
    call = desk.scripts.claim(*desk.deliver(P1), P1, LEASE_MS)
    first, before = desk.run(call), desk.look()
    assert desk.run(call) == first
    assert desk.look() == before


def test_a_repeated_claim_of_a_staged_job_gives_it_again(desk: Desk) -> None:
    desk.to(State.STAGED)
    call = desk.scripts.claim(*desk.deliver(D1, f"decode:{DOMAIN}"), D1, LEASE_MS)
    first = desk.run(call)
    assert first.code == "ok"
    assert desk.run(call) == first


def test_an_entry_is_claimed_by_one_worker_only(desk: Desk) -> None:
    desk.submit()
    entry = desk.deliver(P1)
    assert desk.run(desk.scripts.claim(*entry, P1, LEASE_MS)).code == "ok"
    before = desk.look()
    assert desk.run(desk.scripts.claim(*entry, P2, LEASE_MS)) == Claimed("stale")
    assert desk.look() == before


def test_a_claim_repeated_after_the_job_went_on_is_stale(desk: Desk) -> None:
    desk.submit()
    call = desk.scripts.claim(*desk.deliver(P1), P1, LEASE_MS)
    desk.run(call)
    desk.handoff()
    assert desk.run(call).code == "stale"
    assert desk.fields()["st"] == "staged"


@pytest.mark.parametrize("job", [JOB, "unknown/0"])
def test_an_entry_that_no_job_waits_under_is_dropped(desk: Desk, job: str) -> None:
    desk.submit()
    stream = desk.keys.work("prefill")[0]  # the job waits in another one
    entry = desk.backend.add(stream, {"id": job})
    assert desk.deliver(P1)[2] == job
    desk.checked = False
    assert desk.run(desk.scripts.claim(stream, entry, job, P1, LEASE_MS)).code == "stale"
    assert desk.entries(stream) == []
    assert desk.pending(stream) == {}
    desk.check()
    assert desk.claim(P2).code == "ok"


def test_an_entry_under_which_a_job_waited_before_is_not_the_one_that_counts(desk: Desk) -> None:
    desk.submit()
    desk.backend.set_fields(JOB, v=99)
    stream, old, _ = entry = desk.deliver(P1)
    call = desk.scripts.claim(*entry, P1, LEASE_MS)
    assert desk.run(call).code == "newer"  # now it waits further back in the same stream
    desk.backend.set_fields(JOB, v=1)
    assert desk.run(call).code == "stale"
    ((new, _),) = desk.entries(stream)
    assert new != old
    assert desk.claim(P2).code == "ok"


def test_a_stray_entry_does_not_hand_a_running_job_to_its_owner_twice(desk: Desk) -> None:
    desk.to(State.PREFILL)
    stream = desk.keys.work("prefill")[0]
    desk.backend.add(stream, {"id": JOB})
    desk.checked = False
    assert desk.claim(P1).code == "stale"
    desk.check()


def test_a_claim_that_cannot_be_placed_puts_the_entry_back_in_front_of_its_class(desk: Desk) -> None:
    desk.submit(new_job("r/0"), new_job("r/1"))
    entry = desk.deliver(P1)
    call = desk.scripts.claim(*entry, P1, LEASE_MS, False)
    assert desk.run(call).code == "back"
    assert desk.waiting() == {"work:prefill:normal:r": ["r/0"], "work:prefill:normal:n": ["r/1"]}
    assert desk.run(call).code == "stale"
    claim = desk.claim(P2).claim
    assert claim is not None
    assert (claim.id, claim.epoch) == ("r/0", 1)


def test_a_staged_job_put_back_can_be_taken_by_another_worker(desk: Desk) -> None:
    desk.to(State.STAGED)
    assert desk.claim(D1, f"decode:{DOMAIN}", place=False).code == "back"
    assert desk.renew(P1, "export") == "hold"
    assert desk.claim(D2, f"decode:{DOMAIN}").code == "ok"


def test_a_job_of_a_newer_protocol_is_left_to_newer_workers(desk: Desk) -> None:
    desk.submit()
    desk.backend.set_fields(JOB, v=99, spec="of another time")
    answer = desk.claim(P1)
    assert answer == Claimed("newer")
    # Back at the end of its class, so that it does not stand in the way of jobs this worker can do.
    assert desk.waiting() == {"work:prefill:normal:n": [JOB]}


@pytest.mark.parametrize("ids", [(), (7, 8)], ids=["from scratch", "with ids"])
def test_a_job_whose_hash_alone_was_lost_is_submitted_as_if_nothing_had_been_left(
    server_desk: ServerDesk, ids: tuple[int, ...]
) -> None:
    server_desk.to(State.DECODE)
    server_desk.redis.delete(server_desk.keys.job(JOB))
    again = replace(new_job(), epoch=2, ids=ids)
    assert server_desk.submit(again) == ("new",)
    assert (server_desk.view().state, server_desk.view().ids) == (State.QUEUED, ids)
    assert server_desk.submit(again) == ("exists",)
    server_desk.check()


# Both clients.


async def test_the_asyncio_client_heals_a_flushed_script_cache(server_desk: ServerDesk, any_server: Server) -> None:
    queue = AsyncQueue(server_desk.settings)
    any_server.client.script_flush()
    assert await queue.run(queue.scripts.submit([new_job()])) == ("new",)
    any_server.client.script_flush()
    assert await queue.run(queue.scripts.cancel(JOB)) == "ended"
    await queue.aclose()


async def test_the_asyncio_client_sends_several_calls_at_once_and_heals_too(
    server_desk: ServerDesk, any_server: Server
) -> None:
    queue = AsyncQueue(server_desk.settings)
    await queue.run(queue.scripts.submit([new_job(f"a/{index}", choices=2) for index in range(2)]))
    any_server.client.script_flush()
    cancels = [queue.scripts.cancel(job) for job in ("a/0", "nobody/0", "a/1", "a/0")]
    assert await queue.run_many(cancels) == ["ended", "gone", "ended", "done"]
    assert await queue.run_many([]) == []
    with pytest.raises(QueueError):
        await queue.run_many([cancels[0], replace(cancels[0], name="emit")])
    await queue.aclose()


def test_specs_with_large_seeds_survive_lua(desk: Desk) -> None:
    job = new_job()
    spec = JobSpec(JOB, (2**31 - 1,), replace(job.spec.sampling, seed=2**64 - 1, stop=("ä\x00\n", "🙂")))
    desk.submit(replace(job, spec=spec))
    claim = desk.claim(P1).claim
    assert claim is not None
    assert claim.spec == spec


def keyed(request: str, digest: str = "d", count: int = 2, **extra: Any) -> list[NewJob]:
    """The jobs of a request that its client may send again under the key "k"."""
    return [new_job(f"{request}/{index}", choices=count, key="k", digest=digest, **extra) for index in range(count)]


def sent_before(desk: Desk, jobs: list[NewJob]) -> SentBefore:
    with pytest.raises(SentBefore) as caught:
        desk.submit(*jobs)
    return caught.value


def test_a_request_that_is_sent_again_under_its_key_is_the_one_before(desk: Desk) -> None:
    assert desk.submit(*keyed("a")) == ("new", "new")
    assert desk.submit(*keyed("a")) == ("exists", "exists")  # the same submit once more
    found = sent_before(desk, keyed("b"))
    assert (found.request_id, found.same) == ("a", True)
    assert set(desk.look().jobs) == {"a/0", "a/1"}


def test_another_body_under_the_same_key_is_refused(desk: Desk) -> None:
    desk.submit(*keyed("a"))
    found = sent_before(desk, keyed("b", digest="e"))
    assert (found.request_id, found.same) == ("a", False)


def test_a_request_that_failed_may_be_sent_again(desk: Desk) -> None:
    desk.submit(*keyed("a"))
    assert desk.run(desk.scripts.cancel("a/1", "")) == "ended"
    assert desk.submit(*keyed("b")) == ("new", "new")
    assert sent_before(desk, keyed("c")).request_id == "b"


def test_an_answer_that_is_whole_is_kept_a_day_under_its_key(desk: Desk) -> None:
    desk.submit(*keyed("a", count=1, epoch=2, ids=tuple(range(16))))  # complete: only its end was lost
    assert desk.view("a/0").state == State.DONE
    assert sent_before(desk, keyed("b", count=1)).request_id == "a"
    found = desk.run(desk.scripts.attach("a/0", "api#1"))
    assert found is not None
    assert 86_300_000 < found.forgotten_ms <= 86_400_000


def test_what_redis_lost_comes_back_without_taking_a_key_from_another(desk: Desk) -> None:
    desk.submit(*keyed("b", count=1))
    assert desk.submit(*keyed("a", count=1, epoch=2)) == ("new",)
    assert sent_before(desk, keyed("c", count=1)).request_id == "b"
