"""Checks of the Redis-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from prelay_queue.scripts import NAMES
from prelay_queue.server import NEARLY_FULL, ServerInfo, nearly_full, version_tuple
from prelay_queue.settings import MINIMUM_REDIS, MINIMUM_VALKEY

from ..host import size
from .examine import Server
from .facts import Binary, Facts
from .finding import Finding, fail, ok, warn
from .registry import Checks

checks = Checks("the queue's server")

#: A median round trip above this slows every token down. Milliseconds.
SLOW_TRIP_MS = 5.0
#: A difference of clocks above this is shown. Seconds.
CLOCK_S = 1.0


@checks.of("server program", Facts.binary)
def program(binary: Binary) -> Finding:
    if binary.found is None:
        return ok("none here, and none needed: a --redis-url is given")
    return ok(str(binary.found) if binary.is_wanted else f"{binary.found}, not used: a --redis-url is given")


@checks.of(
    "server", Facts.server, "is it running, and are address and password right? Without a --redis-url one is made"
)
def version(server: Server) -> Finding:
    about = server.about
    found = f"{about.kind} {about.version} ({server.where})"
    minimum = MINIMUM_VALKEY if about.kind == "valkey" else MINIMUM_REDIS
    if version_tuple(about.version)[: len(minimum)] < minimum:
        return fail(found, f"too old: at least {about.kind} {'.'.join(map(str, minimum))} is needed")
    return ok(found)


@checks.of("role", Facts.server)
def role(server: Server) -> Finding:
    if server.about.role == "master":
        return ok("master")
    master = f" of {server.info.get('master_host')}:{server.info.get('master_port')}"
    found = f"{server.about.role}{master if server.info.get('master_host') else ''}"
    return fail(found, "Prelay writes: give the master's --redis-url")


@checks.of("cluster mode", Facts.server)
def cluster(server: Server) -> Finding:
    if server.moved:
        return fail(
            f"on, and this fleet's keys belong to {server.moved}",
            "Prelay does not follow redirections yet: use a server that is no cluster",
        )
    if int(server.info.get("cluster_enabled", 0)):
        return warn(
            "on; this fleet's keys are on this node now",
            "when their slot moves to another node nothing works: use a server that is no cluster",
        )
    return ok("off")


@checks.of("eviction", Facts.server)
def eviction(server: Server) -> Finding:
    about = server.about
    if about.policy == "noeviction":
        return ok("maxmemory-policy noeviction")
    found = f"maxmemory-policy {about.policy}"
    found += f", maxmemory {size(about.maxmemory)}" if about.maxmemory else ", no maxmemory yet"
    advice = "under memory pressure the server deletes jobs: CONFIG SET maxmemory-policy noeviction"
    # Without a limit nothing is evicted yet; the next operator who sets one loses jobs.
    return fail(found, advice) if about.maxmemory else warn(found, advice)


@checks.of("server memory", Facts.server)
def server_memory(server: Server) -> Finding:
    about: ServerInfo = server.about
    if not about.maxmemory:
        return ok(f"{size(about.used_memory)} used, no maxmemory: what the machine has is the limit")
    found = f"{size(about.used_memory)} used of maxmemory {size(about.maxmemory)}"
    if nearly_full(about.used_memory, about.maxmemory):
        return warn(found, f"new requests are answered 503 from {NEARLY_FULL:.0%} on: raise maxmemory")
    return ok(found)


@checks.of("persistence", Facts.server)
def persistence(server: Server) -> Finding:
    info, config = server.info, server.config
    if str(info.get("aof_last_write_status", "ok")) != "ok":
        return fail("the last write of the AOF failed", "writes are refused until one works: is its disk full?")
    if str(info.get("rdb_last_bgsave_status", "ok")) != "ok" and config.get("save"):
        return fail("the last snapshot failed", "writes are refused until one works: look at disk, memory, server log")
    if int(info.get("aof_enabled", 0)):
        fsync = config.get("appendfsync", "")
        return ok(f"AOF{f', fsync {fsync}' if fsync else ''}: a crash of the server loses {_LOSSES.get(fsync, _ASK)}")
    advice = "CONFIG SET appendonly yes, then CONFIG REWRITE: a crash then loses a second"
    if config.get("save"):
        return warn(f"snapshots only: a crash of the server loses {_since_snapshot(info)}", advice)
    if "save" not in config:
        return warn("no AOF; whether it takes snapshots it does not say: a crash may lose the whole queue", advice)
    return warn("none: a crash or restart of the server loses the whole queue", advice)


_ASK = "what was not synced yet; how much that is, it does not say"
_LOSSES = {
    "always": "nothing that it acknowledged",
    "everysec": "the last second, or two under load",
    "no": "what the system had not written yet, up to half a minute",
}


def _since_snapshot(info: Mapping[str, Any]) -> str:
    changes = info.get("rdb_changes_since_last_save")
    counted = f": {changes} changes now" if changes is not None else ""
    return f"all since the last one{counted}"


@checks.of("scripts", Facts.server)
def scripts(server: Server) -> Finding:
    if server.moved:
        return fail("not tried: a cluster sends them elsewhere", "see cluster mode")
    if server.scripts:
        return fail(f"do not run: {server.scripts}", "the user of the --redis-url needs EVALSHA, EVAL and SCRIPT LOAD")
    return ok(f"all {len(NAMES)} load, EVALSHA runs them, flags are kept")


@checks.of("clock", Facts.server)
def clock(server: Server) -> Finding:
    """Leases, heartbeats and deadlines are all on the server's clock, so no difference is wrong."""
    if abs(server.ahead_s) <= CLOCK_S:
        return ok(f"this host's and the server's agree within {CLOCK_S:g} s")
    how = "ahead of" if server.ahead_s > 0 else "behind"
    return ok(f"the server's is {abs(server.ahead_s):.1f} s {how} this host's; no effect: only the server's counts")


@checks.of("round trip", Facts.server)
def round_trip(server: Server) -> Finding:
    trips = server.trips_ms
    found = f"median {median(trips):.2f} ms, longest of {len(trips)} {max(trips):.2f} ms"
    if median(trips) > SLOW_TRIP_MS:
        return warn(found, "every token waits for one: put the server nearer to the workers")
    return ok(found)


@checks.of("fleets", Facts.server)
def fleets(server: Server) -> Finding:
    if server.looks is None:
        return warn(
            f"cannot be looked at: {server.no_looks}", "allow SCAN and reading commands, to see what is left over"
        )
    look = server.looks.second
    if not look.fleets:
        return ok("none has used this server")
    words = [f"{fleet}: {fleet.open_jobs} open job(s), {len(fleet.workers)} live worker(s)" for fleet in look.fleets]
    if not look.complete:
        return warn(
            f"{'; '.join(words)}; too many keys to look at all", "what is left over may be more than shown", words
        )
    return ok("; ".join(words), words)
