"""The life of an API process: how it starts, what it does when a client or the process itself goes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from prelay_api.config import ApiConfig
from prelay_queue.settings import QueueSettings
from prelay_queue.state import State
from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener, check_stream, stream
from tests.bed.child import encode
from tests.bed.forks import ROOT
from tests.bed.http import client_of, get, post
from tests.bed.processes import Api, Fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server

COMPLETIONS = "/v1/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1, 2], "max_tokens": 50, **more}


# --- a client that goes


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_ends_its_job(quiet_api: Api, scripted: ScriptedWorker, streaming: bool) -> None:
    scripted.listen()
    async with client_of(quiet_api.url) as client:
        task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=streaming)))
        claim = await asyncio.to_thread(scripted.take)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(until, lambda: scripted.state(claim.id)["st"] == State.DONE)
    assert scripted.state(claim.id)["fin"] == "cancelled"
    assert scripted.heard() == [{"op": "stop", "id": claim.id, "ep": 1}]


async def test_a_client_that_leaves_while_it_waits_takes_its_job_out_of_the_queue(
    quiet_api: Api, quiet_queue: QueueSettings, scripted: ScriptedWorker
) -> None:
    backlog = scripted.queue.keys.work("prefill")
    redis = scripted.queue.redis
    async with client_of(quiet_api.url) as client:
        tasks = [asyncio.create_task(client.post(COMPLETIONS, json=body(n=3))) for _ in range(20)]
        await asyncio.to_thread(until, lambda: sum(redis.xlen(key) for key in backlog) == 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(until, lambda: sum(redis.xlen(key) for key in backlog) == 0)
    assert redis.zcard(scripted.queue.keys.queued) == 0


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    for role in (Role.PREFILL, Role.DECODE):
        new_fleet.worker(role, null=NullModel(step_ms=3, prefill_ms_per_token=1))
    until_ready(api.url)

    async def leave_after(client: httpx.AsyncClient, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await stream(client, COMPLETIONS, body(prompt=list(range(30)), max_tokens=4000))
        except TimeoutError:
            pass

    async with client_of(api.url) as client:
        await asyncio.gather(*(leave_after(client, 0.02 * n) for n in range(60)))
        kv = await asyncio.to_thread(until, lambda: _all_free(api))
        assert len(kv) == 2
        check_stream(await stream(client, COMPLETIONS, body()), [1, 2], 50)


def _all_free(api: Api) -> list[dict[str, int]] | None:
    """The pools of all workers, when nothing of them is taken."""
    pools = [worker["kv"] for worker in get(f"{api.url}/admin/workers").json()["workers"]]
    return pools if all(kv["free"] == kv["total"] for kv in pools) else None


# --- the process goes


@pytest.mark.parametrize("streams", [0, 30])
async def test_sigterm_tells_every_client_to_try_again_and_exits_with_zero(new_fleet: Fleet, streams: int) -> None:
    api = new_fleet.api()
    worker = ScriptedWorker(new_fleet.queue)
    listeners = [Listener(api.url, COMPLETIONS, body()) for _ in range(streams)]
    claims = [await asyncio.to_thread(worker.take) for _ in listeners]
    for claim in claims:
        worker.emit(claim, 0, [5])
    await asyncio.to_thread(until, lambda: all(listener.ids == [5] for listener in listeners))
    async with client_of(api.url) as client:
        waiting = asyncio.create_task(client.post(COMPLETIONS, json=body()))
        await asyncio.to_thread(worker.claim)
        began = time.monotonic()
        assert await asyncio.to_thread(api.stop) == 0
        assert time.monotonic() - began < 8
        reply = await waiting
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "2"
    for listener in listeners:
        found = await asyncio.to_thread(listener.end)
        assert found.error is not None
        assert found.error["code"] == "service_unavailable"
        assert found.done
        assert found.choices[0].ids == [5]
    keys = worker.queue.keys
    assert worker.queue.redis.keys(f"{keys.prefix}live:*") == []
    assert not worker.queue.redis.exists(keys.apis)
    assert {worker.state(claim.id)["fin"] for claim in claims} <= {"cancelled"}
    assert "Traceback" not in api.log
    worker.close()


def test_a_client_that_does_not_read_does_not_hold_up_the_exit(new_fleet: Fleet) -> None:
    api = new_fleet.api(shutdown_grace_s=1)
    new_fleet.worker(Role.UNIFIED, null=NullModel(step_ms=0), max_running=8)
    until_ready(api.url)
    host, port = api.url.removeprefix("http://").split(":")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        payload = orjson.dumps(body(stream=True, n=8, max_tokens=2000))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
        deaf.sendall(head.encode() + payload)
        until(lambda: get(f"{api.url}/admin/workers").json()["workers"][0]["computed_tokens"] > 4000, 60)
        began = time.monotonic()
        assert api.stop() == 0
        assert time.monotonic() - began < 8


# --- the process does not even start


def start(config: ApiConfig) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bed.child", "api", encode(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ, check=False)


def test_a_taken_port_is_one_line_and_exit_code_one(shared_server: Server, null_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = start(ApiConfig(shared_server.settings(), null_folder, "null", port=port))
    assert found.returncode == 1
    assert found.stderr == f"prelay api: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "no.such.host.invalid"}, "host 'no.such.host.invalid' is not an address of this machine"),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"port": 70_000}, "port 70000 is not from 0 to 65535"),
        ({"keep": "all"}, "keep must be delivered or emitted, not 'all'"),
        ({"model": Path("/nowhere")}, "/nowhere: no such model folder"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_one(
    shared_server: Server, null_folder: Path, changes: dict[str, Any], words: str
) -> None:
    config = replace(ApiConfig(shared_server.settings(), null_folder, "null", port=0), **changes)
    found = start(config)
    assert found.returncode == 1
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_an_api_that_starts_before_its_queue_serves_once_the_queue_is_there(
    own_server: Server, null_folder: Path
) -> None:
    settings = own_server.settings()
    own_server.kill()
    found = Fleet(settings, null_folder)
    api = Api(ApiConfig(settings, null_folder, "null", port=0))
    found.processes.append(api)
    try:
        url = api.wait_for(r"serving \S+ on (http://\S+)")[1]
        reply = until(lambda: _get(f"{url}/health/ready"))
        assert reply.status_code == 503
        assert get(f"{url}/health/live").status_code == 200
        assert post(url + COMPLETIONS, json=body()).status_code == 503
        own_server.start()
        found.worker(Role.UNIFIED)
        until_ready(url)
        client = Listener(url, COMPLETIONS, body())
        check_stream(client.end(), [1, 2], 50)
    finally:
        found.close()


def _get(url: str) -> httpx.Response | None:
    try:
        return get(url, timeout=5)
    except httpx.ConnectError:
        return None
