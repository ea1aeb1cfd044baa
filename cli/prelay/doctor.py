"""`prelay doctor`: what this machine and these settings are good for, and what to do about the rest."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prelay_queue.server import ServerInfo

from .embedded import EmbeddedServer
from .errors import CliError
from .geometry import Geometry
from .host import SHM, check_port, size, this_host
from .model import resolve_with_progress
from .queueserver import inspect_server
from .redact import redact
from .roles import geometry
from .segments import segment_files
from .settings import Settings, unknown_variables
from .sizing import sizes
from .statedir import StateDir
from .supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. `state` is ok, warn or fail."""

    name: str
    state: str
    found: str
    advice: str = ""


def doctor(settings: Settings) -> int:
    """Print the table. Return 1 when something would keep `prelay serve` from working, else 0."""
    checks = run_checks(settings)
    _print(checks)
    return 1 if any(check.state == "fail" for check in checks) else 0


def run_checks(settings: Settings) -> list[Check]:
    """Look at everything; one failure does not keep the others from being seen."""
    checks = [_python(), _variables()]
    checks += _queue(settings)
    checks += _model(settings)
    checks += [_guard("port", lambda: _port(settings)), _segments()]
    return checks


def _guard(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except CliError as error:
        return Check(name, "fail", str(error))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if not sys.platform.startswith("linux"):
        return Check("python", "fail", f"{version} on {sys.platform}", "Prelay needs Linux")
    return Check("python", "ok", f"{version} ({sys.executable})")


def _variables() -> Check:
    if unknown := unknown_variables():
        return Check("environment", "warn", f"unknown: {', '.join(unknown)}", "misspelt? prelay serve --help names all")
    return Check("environment", "ok", "no unknown PRELAY_ variables")


def _queue(settings: Settings) -> list[Check]:
    try:
        if settings.url is not None:
            info, where = inspect_server(settings.url), redact(settings.url)
        else:
            info, where = asyncio.run(_try_embedded())
    except CliError as error:
        return [Check("server", "fail", str(error))]
    return [
        Check("server", "ok", f"{info.kind} {info.version} ({where}); all scripts load"),
        _eviction(info),
        _persistence(info),
        _server_memory(info),
    ]


def _persistence(info: ServerInfo) -> Check:
    if info.aof:
        return Check("persistence", "ok", "appendonly is on")
    advice = "a restart of the server loses the queue: CONFIG SET appendonly yes"
    return Check("persistence", "warn", "appendonly is off", advice)


def _eviction(info: ServerInfo) -> Check:
    if info.policy == "noeviction":
        return Check("eviction", "ok", "maxmemory-policy noeviction")
    advice = "under memory pressure the server deletes jobs: CONFIG SET maxmemory-policy noeviction"
    # Without a limit nothing is evicted yet; the next operator who sets one loses jobs.
    return Check("eviction", "fail" if info.maxmemory else "warn", f"maxmemory-policy {info.policy}", advice)


def _server_memory(info: ServerInfo) -> Check:
    limit = size(info.maxmemory) if info.maxmemory else "no limit"
    found = f"{size(info.used_memory)} used of {limit}"
    if info.maxmemory and info.used_memory > info.maxmemory * 0.8:
        return Check("server memory", "warn", found, "a full server takes no new work: raise maxmemory")
    return Check("server memory", "ok", found)


async def _try_embedded() -> tuple[ServerInfo, str]:
    """Start the private server in a scratch directory, ask it everything, and stop it."""
    with tempfile.TemporaryDirectory(prefix="prelay-doctor-") as scratch:
        state = StateDir(Path(scratch))
        try:
            server = EmbeddedServer(state, this_host().memory)
            supervisor = Supervisor(lambda _name, _line: None)
            keeper = supervisor.keep(server.spec())
            try:
                await supervisor.or_failure(server.wait_ready(lambda: keeper.child, lambda _: None))
                return await asyncio.to_thread(inspect_server, server.url), f"private, {server.binary.path}"
            finally:
                await supervisor.stop(["server"])
                supervisor.close()
                server.close()
        finally:
            state.close()


def _model(settings: Settings) -> list[Check]:
    try:
        folder = resolve_with_progress(settings.model)
        kv = geometry(settings, folder)
    except CliError as error:
        return [Check("model", "fail", str(error), "prelay model fetch-demo gets the demo model")]
    return [Check("model", "ok", str(folder)), _guard("memory", lambda: _memory(settings, kv))]


def _memory(settings: Settings, kv: Geometry | None) -> Check:
    host = this_host()
    found = f"{size(host.memory_free)} free of {size(host.memory)}, {size(host.shm_free)} free in /dev/shm"
    planned = sizes(settings, kv, host)
    return Check(
        "memory", "ok", f"{found}: decode {planned.kv_blocks} blocks, prefill {planned.prefill_kv_blocks} blocks,"
        f" {planned.threads} thread(s) a worker on {host.cores} core(s)",
    )  # fmt: skip


def _port(settings: Settings) -> Check:
    check_port(settings.host, settings.port)
    return Check("port", "ok", f"{settings.host}:{settings.port} is free")


def _segments(folder: Path = SHM) -> Check:
    """Segments of dead workers: the lock of a live one's is held."""
    files = segment_files(folder)
    orphans = [path.name for path in files if _is_free(path)]
    if orphans:
        return Check(
            "KV segments", "warn", f"{len(orphans)} left by a crash: {', '.join(orphans[:3])}",
            "the next prelay serve removes them",
        )  # fmt: skip
    return Check("KV segments", "ok", f"{len(files)} in use, none left over")


def _is_free(path: Path) -> bool:
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: beside a sweep or a starting owner it takes nothing away for longer than this look.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def _print(checks: list[Check]) -> None:
    table = Table("", "check", "found", "what to do", box=None, pad_edge=False)
    for check in checks:
        mark, style = _MARKS[check.state]
        table.add_row(Text(mark, style=style), check.name, Text(check.found), Text(check.advice))
    Console(highlight=False).print(table)
