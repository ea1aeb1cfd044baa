"""Checks of what this configuration names: the model, the port, the state directory."""

from __future__ import annotations

from ..host import size
from .examine import JobsServer
from .facts import Facts, Model
from .finding import Finding, fail, ok, warn
from .places import Files, Port, State
from .registry import Checks

checks = Checks("this configuration")

#: A disk with less than this is nearly full: the server refuses writes when its log cannot be written. Bytes.
LOW_DISK = 1 << 30


@checks.of(
    "model", Facts.model, "--model takes a Hugging Face folder, a .gguf file or a hub id; absent, the demo model"
)
def model(found: Model) -> Finding:
    context = f", context {found.kv.context_len} tokens" if found.kv else ""
    return ok(f"{found.folder}{context}")


@checks.of("port", Facts.port)
def port(found: Port) -> Finding:
    where = f"{found.host}:{found.port}"
    if not found.problem:
        return ok(f"{where} is free")
    if not found.answers:
        return fail(found.problem)
    if found.is_ours:
        return ok(f"{where} is the running prelay serve's, which is {found.answers}")
    return warn(f"{where} is taken by a Prelay API, which is {found.answers}", "a second one needs another --port")


@checks.of("state directory", Facts.state)
def state_directory(found: State) -> Finding:
    if not found.is_wanted:
        return ok("not used: a --redis-url is given")
    if found.problem:
        return fail(found.problem, "another --state-dir, or put this one right")
    if found.is_running:
        return ok(f"{found.root}, in use by a running prelay serve (pid {found.holder}), {size(found.free)} free")
    if found.server_held:
        return warn(
            f"{found.root}: a server without prelay serve still has it",
            "it ends by itself; the next prelay serve waits for it, and tells it to end after 2 s",
        )
    words = f"{found.root}{'' if found.exists else ' (made at the first start)'}, {size(found.free)} free"
    if found.free < LOW_DISK:
        return warn(words, "when the disk is full the server refuses all writes: make room")
    return ok(f"{words}, writable, nobody uses it")


@checks.of("files of batches", Facts.files)
def files(found: Files) -> Finding:
    if found.problem:
        return fail(found.problem, "another --files-dir, or put this one right")
    words = f"{found.root}{'' if found.exists else ' (made at the first start)'}, {size(found.free)} free"
    if found.free < LOW_DISK:
        return warn(words, "uploads are refused, and batches stand still, when the disk is full: make room")
    return ok(f"{words}, writable")


@checks.of(
    "server of batch jobs", Facts.jobs_server, "is it running, and are address and password of --batch-redis-url right?"
)
def jobs_server(found: JobsServer) -> Finding:
    about = found.about
    words = f"{about.kind} {about.version} ({found.where})"
    if found.is_cluster:
        return fail(f"{words}, a cluster", "RQ has no cluster mode: give a --batch-redis-url that is none")
    if about.role != "master":
        return fail(f"{words}, a {about.role}", "RQ writes: give the master's --batch-redis-url")
    return ok(words)
