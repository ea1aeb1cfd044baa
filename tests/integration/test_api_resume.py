"""Streams that outlive the connection, and the API process, that they began on."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prelay_queue.job import JobSpec, Priority, Sampling
from prelay_queue.scripts import NewJob
from prelay_queue.state import State
from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener, check_chain, check_stream, expected_chain, stream, usage
from tests.bed.http import client_of
from tests.bed.parts import RESUMABLE, STREAMS, Part, get_part, joined, post_part
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW = NullModel(step_ms=20)


@pytest.fixture(scope="module")
def two(any_server: Server, null_folder: Path) -> Iterator[tuple[Api, Api]]:
    """Two API processes before one slow fleet, on a server of each kind."""
    with fleet(any_server.settings(), null_folder) as found:
        apis = found.api(), found.api()
        found.worker(Role.PREFILL, null=SLOW)
        found.worker(Role.DECODE, null=SLOW)
        for api in apis:
            until_ready(api.url)
        yield apis


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 60, **more}


async def test_a_stream_goes_on_with_another_api_process(two: tuple[Api, Api]) -> None:
    first, second = two
    async with client_of(first.url) as here, client_of(second.url) as there:
        begun = await post_part(here, COMPLETIONS, body([1, 2], n=2), most=9, headers=RESUMABLE)
        assert begun.headers["preference-applied"] == "resumable"
        middle = await get_part(there, begun.id, begun.last_id, most=11)
        rest = await get_part(here, begun.id, middle.last_id)
    check_stream(joined([begun, middle, rest]), [1, 2], 60, choices=2)


async def test_a_chat_s_role_is_told_once(two: tuple[Api, Api]) -> None:
    asked = {"model": "null", "messages": chat([5, 6]), "n": 2, "max_tokens": 20}
    first, second = two
    async with client_of(first.url) as here, client_of(second.url) as there:
        begun = await post_part(here, CHAT, asked, most=2, headers=RESUMABLE)
        rest = await get_part(there, begun.id, begun.last_id)
    assert [frame.id for frame in begun.frames] == ["", "0-0,0-0"]
    check_stream(joined([begun, rest]), [5, 6], 20, choices=2, chat=True)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, body([7], max_tokens=12, n=2, stream_options={"include_usage": True}, logprobs=1)),
        (COMPLETIONS, body([7, 8], max_tokens=6, echo=True, logprobs=0, return_token_ids=True)),
        (COMPLETIONS, body([7, 8], max_tokens=0, echo=True)),
        (COMPLETIONS, body([3, 1], max_tokens=30, stop=[words(expected_chain([3, 1], 12)[9:12])])),
        (CHAT, {"model": "null", "messages": chat([9]), "n": 3, "max_tokens": 5, "logprobs": True}),
    ],
    ids=["choices", "echo", "prompt only", "stop", "chat"],
)
async def test_an_answer_that_is_over_goes_on_from_each_of_its_frames(
    two: tuple[Api, Api], path: str, asked: dict[str, Any]
) -> None:
    """And what was sent and what comes are together the very stream that nobody interrupted."""
    first, second = two
    async with client_of(first.url) as here, client_of(second.url) as there:
        whole = await stream(here, path, asked)
        again = await get_part(there, whole.id)
        ends = {place: await get_part(there, whole.id, frame.id) for place, frame in _places(whole.frames)}
    assert again.done
    assert _said(again.bodies) == _said(whole.bodies)
    for place, rest in ends.items():
        assert rest.done
        assert _said([*whole.bodies[: place + 1], *rest.bodies]) == _said(whole.bodies)


def _places(frames: list[Any]) -> list[tuple[int, Any]]:
    """Each frame after which a client may go on, but for [DONE] and the usage, whose place is that of the last end."""
    found = [(place, frame) for place, frame in enumerate(frames[:-1]) if frame.id]
    return [
        (place, frame) for place, frame in found if place + 1 == len(frames) - 1 or frames[place + 1].id != frame.id
    ]


def _said(bodies: list[dict[str, Any]]) -> dict[int, dict[str, list[Any]]]:
    """All that was said of each choice, however it was cut into chunks."""
    found: dict[int, dict[str, list[Any]]] = {
        -1: {"usage": [each["usage"] for each in bodies if each.get("usage")][-1:]}
    }
    for each in bodies:
        for choice in each["choices"]:
            said = found.setdefault(choice["index"], {})
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            said["text"] = ["".join([*said.get("text", ()), text])]
            said.setdefault("roles", []).extend("role" for _ in [1] if "role" in choice.get("delta", ()))
            said.setdefault("ends", []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
            said.setdefault("token_ids", []).extend(choice.get("token_ids") or ())
            logprobs = choice["logprobs"] or {}
            said.setdefault("logprobs", []).extend(logprobs.get("token_logprobs") or logprobs.get("content") or ())
            said.setdefault("offsets", []).extend(logprobs.get("text_offset") or ())
    return found


async def test_a_stream_survives_the_api_process_that_began_it(new_fleet: Fleet) -> None:
    doomed, other = new_fleet.api(), new_fleet.api()
    for role in (Role.PREFILL, Role.DECODE):
        new_fleet.worker(role, null=SLOW)
    until_ready(doomed.url)
    async with client_of(doomed.url) as here, client_of(other.url) as there:
        asked = body([4, 2], n=2, max_tokens=150, stream_options={"include_usage": True})
        found = Part()
        asking = asyncio.create_task(post_part(here, COMPLETIONS, asked, found=found))
        await asyncio.to_thread(until, lambda: len(found.frames) > 12)
        doomed.send(signal.SIGKILL)
        begun = await asking
        assert not begun.done
        rest = await get_part(there, begun.id, begun.last_id)
    whole = joined([begun, rest])
    for heard in whole.choices.values():
        check_chain([4, 2], heard.ids)
        assert (len(heard.ids), heard.finishes) == (150, ["length"])
    assert whole.usage == usage(2, 300)


async def test_two_clients_of_one_process_may_read_one_stream(two: tuple[Api, Api]) -> None:
    async with client_of(two[0].url) as client:
        begun = await post_part(client, COMPLETIONS, body([6, 6]), most=3, headers=RESUMABLE)
        found = await asyncio.gather(*(get_part(client, begun.id) for _ in range(3)))
    for each in found:
        check_stream(each, [6, 6], 60)


def test_a_preempt_of_a_stream_with_two_viewers_takes_back_nothing(quiet_api: Api, scripted: ScriptedWorker) -> None:
    """Neither may resume below what the other has."""
    one = Listener(quiet_api.url, COMPLETIONS, body([1]))
    first = scripted.take()
    scripted.emit(first, 0, [10, 11])
    until(lambda: one.ids == [10, 11])
    other = Listener(quiet_api.url, STREAMS + one.found.id, None)
    until(lambda: other.ids == [10, 11])
    scripted.emit(first, 2, [12])
    scripted.preempt(first)
    second = scripted.take()
    assert second.ids == (10, 11, 12)
    scripted.finish(second, 3, [13])
    assert one.end().choices[0].ids == other.end().choices[0].ids == [10, 11, 12, 13]


# --- places that there are not


async def test_a_stream_that_is_not_known_is_not_begun_anew(quiet_api: Api) -> None:
    async with client_of(quiet_api.url) as client:
        found = await get_part(client, "cmpl-0123")
        gone = await client.delete(STREAMS + "cmpl-0123")
    for status, error in ((found.status, found.error), (gone.status_code, gone.json()["error"])):
        assert status == 404
        assert error is not None
        assert error["code"] == "stream_not_found"


async def test_a_job_that_is_nobody_s_to_watch_is_not_ended_by_who_tries(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    job = NewJob(JobSpec("batch_1-0-0/0", (1,), Sampling(9), Priority.BATCH))  # a batch's, and its runner is dead
    scripted.queue.run(scripted.queue.scripts.submit([job]))
    claim = await asyncio.to_thread(scripted.take)
    async with client_of(quiet_api.url) as client:
        assert (await get_part(client, "batch_1-0-0")).status == 404
        # What a try had left behind would be taken back before the next request of this process is answered.
        asking = asyncio.create_task(stream(client, COMPLETIONS, body([1], max_tokens=3)))
        scripted.finish(await asyncio.to_thread(scripted.take), 0, [5])
        await asking
    assert scripted.state(claim.id)["st"] == State.DECODE
    scripted.finish(claim, 0, [7])


async def test_a_stream_that_is_not_kept_any_longer_is_gone(quiet_api: Api, scripted: ScriptedWorker) -> None:
    async with client_of(quiet_api.url) as client:
        asking = asyncio.create_task(stream(client, COMPLETIONS, body([1], max_tokens=3)))
        claim = await asyncio.to_thread(scripted.take)
        scripted.finish(claim, 0, [5])
        whole = await asking
        assert (await get_part(client, whole.id)).done
        keys = scripted.queue.keys
        scripted.queue.redis.delete(keys.job(claim.id), keys.log(claim.id))  # as Redis does five minutes later
        found = await get_part(client, whole.id)
        gone = await client.delete(STREAMS + whole.id)
    for status, error in ((found.status, found.error), (gone.status_code, gone.json()["error"])):
        assert error is not None
        assert (status, error["code"], error["param"]) == (410, "stream_expired", "request_id")
        assert "300 s" in error["message"]


async def test_a_stream_of_many_choices_goes_on_after_few_round_trips(two: tuple[Api, Api]) -> None:
    first, second = two
    asked = body([3], n=128, max_tokens=2)
    async with client_of(first.url) as here, client_of(second.url) as there:
        whole = await stream(here, COMPLETIONS, asked)
        before = await _calls(there)
        again = await get_part(there, whole.id)
        after = await _calls(there)
    check_stream(again, [3], 2, choices=128)
    assert {name: after.get(name, 0) - before.get(name, 0) for name in ("attach", "view", "pipeline")} == {
        "attach": 1, "view": 0, "pipeline": 5,
    }  # fmt: skip


async def _calls(client: httpx.AsyncClient) -> dict[str, int]:
    """How often each script was sent, by name; several together are a pipeline."""
    page = (await client.get("/metrics")).text
    found = re.findall(r'prelay_redis_command_seconds_count\{script="(\w+)"\} (\d+)', page)
    return {name: int(count) for name, count in found}


@pytest.mark.parametrize("cursor", ["x", "1", "1-x", "-1-2", "1-2-3", "1-2,1-2", "9" * 20 + "-1"])
async def test_what_is_no_place_is_refused(two: tuple[Api, Api], cursor: str) -> None:
    async with client_of(two[0].url) as client:
        whole = await stream(client, COMPLETIONS, body([1], max_tokens=3))
        found = await get_part(client, whole.id, cursor)
        same = await client.get(STREAMS + whole.id, params={"from": cursor})
    assert found.status == same.status_code == 400
    assert found.error is not None
    errors = [found.error, same.json()["error"]]
    for error, name in zip(errors, ("Last-Event-ID", "from"), strict=True):
        assert error["param"] == name
        assert error["message"].startswith(name)


@pytest.mark.parametrize("cursor", ["1-3", "2-1", "1-99", "7-0", "0-1"])
async def test_a_place_that_the_stream_never_had_is_no_place_to_go_on_from(two: tuple[Api, Api], cursor: str) -> None:
    async with client_of(two[0].url) as client:
        whole = await stream(client, COMPLETIONS, body([1], max_tokens=3))
        assert whole.frames[-2].id == "1-3"
        found = await get_part(client, whole.id, cursor)
        if cursor == "1-3":  # the end
            assert (found.bodies, found.done) == ([], True)
            return
        same = await client.get(STREAMS + whole.id, params={"from": cursor})
    assert found.status == same.status_code == 409
    assert found.error is not None
    errors = [found.error, same.json()["error"]]
    for error, name in zip(errors, ("Last-Event-ID", "from"), strict=True):
        assert (error["code"], error["param"]) == ("diverged", name)
        assert f"{name} {cursor!r}" in error["message"]


# --- clients that vanish, and do or do not come back


def _states(worker: ScriptedWorker, request_id: str) -> str:
    return worker.state(f"{request_id}/0").get("st", "")


async def test_a_client_that_said_so_is_waited_for_and_no_longer(new_fleet: Fleet) -> None:
    api = new_fleet.api(linger_s=1.5)
    worker = ScriptedWorker(new_fleet.queue)
    async with client_of(api.url) as client:
        asking = asyncio.create_task(post_part(client, COMPLETIONS, body([1]), most=1, headers=RESUMABLE))
        claim = await asyncio.to_thread(worker.take)
        worker.emit(claim, 0, [10])
        begun = await asking
        await asyncio.sleep(0.7)
        assert _states(worker, begun.id) == State.DECODE
        back = asyncio.create_task(get_part(client, begun.id, begun.last_id, most=1))
        worker.emit(claim, 1, [11])
        assert (await back).choices[0].ids == [11]
        await asyncio.to_thread(until, lambda: _states(worker, begun.id) == State.DONE)
        assert worker.state(claim.id)["fin"] == "cancelled"
    worker.close()


async def test_a_client_that_did_not_say_so_has_its_job_ended_at_once(quiet_api: Api, scripted: ScriptedWorker) -> None:
    async with client_of(quiet_api.url) as client:
        asking = asyncio.create_task(post_part(client, COMPLETIONS, body([1]), most=1))
        claim = await asyncio.to_thread(scripted.take)
        scripted.emit(claim, 0, [10])
        begun = await asking
        await asyncio.to_thread(until, lambda: _states(scripted, begun.id) == State.DONE, 2.0)
        found = await get_part(client, begun.id, begun.last_id)
    assert found.error is not None
    assert found.error["code"] == "cancelled"


async def test_who_asks_whether_there_is_a_stream_does_not_watch_it(quiet_api: Api, scripted: ScriptedWorker) -> None:
    """So it is not ended when they leave, and what they were told of counts as delivered to nobody."""
    async with client_of(quiet_api.url) as client:
        asking = asyncio.create_task(post_part(client, COMPLETIONS, body([1]), most=1, headers=RESUMABLE))
        claim = await asyncio.to_thread(scripted.take)
        scripted.emit(claim, 0, [10])
        begun = await asking
        scripted.emit(claim, 1, [11])
        for _ in range(2):
            found = await client.head(STREAMS + begun.id, timeout=2)
            assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await client.head(STREAMS + "none")).status_code == 404
        assert _states(scripted, begun.id) == State.DECODE
        assert (await get_part(client, begun.id, begun.last_id, most=1)).choices[0].ids == [11]


async def test_delete_ends_a_stream_for_all_who_read_it(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([1], n=2))
    for claim in (scripted.take(), scripted.take()):
        scripted.emit(claim, 0, [10])
    until(lambda: len(client.found.choices) == 2)
    async with httpx.AsyncClient(base_url=quiet_api.url) as other:
        answer = (await other.delete(STREAMS + client.found.id)).json()
        again = (await other.delete(STREAMS + client.found.id)).json()
    assert answer["choices"] == [{"index": index, "cancelled": True} for index in range(2)]
    assert again["choices"] == [{"index": index, "cancelled": False} for index in range(2)]
    found = client.end()
    assert found.error is not None
    assert found.error["code"] == "cancelled"
    assert found.done


# --- a process that is told to stop


async def test_a_process_that_stops_lets_streams_end_while_it_takes_no_new_ones(new_fleet: Fleet) -> None:
    api = new_fleet.api(drain_s=30.0)
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body([1]))
    claim = await asyncio.to_thread(worker.take)
    worker.emit(claim, 0, [10])
    await asyncio.to_thread(until, lambda: client.ids == [10])
    api.send(signal.SIGTERM)
    await asyncio.sleep(0.3)
    worker.finish(claim, 1, [11])
    found = await asyncio.to_thread(client.end)
    assert (found.choices[0].ids, found.done, found.error) == ([10, 11], True, None)
    assert await asyncio.to_thread(api.wait, 5) == 0
    worker.close()


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stream_that_outlasts_the_drain_is_told_or_handed_on(new_fleet: Fleet, signals: int) -> None:
    """A second signal ends the drain at once."""
    stopping, other = new_fleet.api(drain_s=0.5 if signals == 1 else 60.0), new_fleet.api()
    worker = ScriptedWorker(new_fleet.queue)
    told = Listener(stopping.url, COMPLETIONS, body([1]))
    claims = [await asyncio.to_thread(worker.take)]
    async with client_of(stopping.url) as here, client_of(other.url) as there:
        asking = asyncio.create_task(post_part(here, COMPLETIONS, body([2]), headers=RESUMABLE))
        claims.append(await asyncio.to_thread(worker.take))
        for claim in claims:
            worker.emit(claim, 0, [10])
        await asyncio.to_thread(until, lambda: told.ids == [10])
        for _ in range(signals):
            stopping.send(signal.SIGTERM)
            await asyncio.to_thread(stopping.wait_for, "told to stop")
        found, begun = await asyncio.to_thread(told.end), await asking
        assert await asyncio.to_thread(stopping.wait, 10) == 0
        assert found.error is not None
        assert "shutting down" in found.error["message"]
        assert (begun.done, begun.error) == (False, None)
        worker.finish(claims[1], 1, [11])
        rest = await get_part(there, begun.id, begun.last_id)
    assert joined([begun, rest]).choices[0].ids == [10, 11]
    assert worker.state(claims[0].id)["fin"] == "cancelled"
    worker.close()


# --- silence, and clients that do not read


def test_a_silent_stream_says_where_its_request_is(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([1]))
    said = client.found.said
    until(lambda: any(each.startswith("queued ") for each in said))
    claim = scripted.claim()
    until(lambda: "prefill" in said)
    assert scripted.queue.run(scripted.queue.scripts.adopt(claim.id, claim.epoch, scripted.id)) == "ok"
    scripted.emit(claim, 0, [10])
    until(lambda: "decode" in said)
    scripted.preempt(claim)
    second = scripted.take()
    until(lambda: "resumed" in said)
    assert said.index("preempted") < said.index("resumed")
    scripted.finish(second, 1, [11])
    assert ids_of(client.end().choices[0].text) == [10, 11]


def test_a_client_that_takes_nothing_is_cut_off_and_its_jobs_end(new_fleet: Fleet) -> None:
    api = new_fleet.api(stall_s=1.0)
    for role in (Role.PREFILL, Role.DECODE):
        new_fleet.worker(role)
    until_ready(api.url)
    watcher = ScriptedWorker(new_fleet.queue)
    host, port = api.url.removeprefix("http://").split(":")
    asked = httpx.Request("POST", api.url + COMPLETIONS, json=body([1], n=16, max_tokens=4000, logprobs=1, stream=True))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
        api.wait_for("took nothing for 1 s", timeout_s=60)
        keys = watcher.queue.keys
        until(lambda: watcher.queue.redis.zcard(keys.leases) == watcher.queue.redis.zcard(keys.queued) == 0)
    watcher.close()
