"""What CUDA's runtime says, as a child process found it out (gpulook.py), and what that could not find out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prelay_kv.cuda.paths import Facts, ProbeResult

from ..gpulook import Question
from .ask import Said, ask

#: The child. -P: no module of the folder where it happens to run.
COMMAND = (sys.executable, "-P", "-m", "prelay.gpulook")
#: How long the child may take, in seconds, and how much longer for each device whose memory another process reads.
LIMIT_S, PROBE_S = 15, 12


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as CUDA sees it. Bytes of its memory, if they were asked for; `problem` is why it cannot be used."""

    uuid: str
    free: int = 0
    total: int = 0
    problem: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Cuda:
    """All that was found out. `problem`, with the code of a CUDA error, is why there is no more.

    `reaches` says of (reader, owner) whether that device reaches the other's memory; `facts` are those by which a
    prefill worker on a device chooses the path of KV.
    """

    library: str = ""
    devices: tuple[Device, ...] = ()
    reaches: Mapping[tuple[int, int], bool] = field(default_factory=dict)
    facts: Mapping[int, Facts] = field(default_factory=dict)
    problem: str = ""
    code: int | None = None


def look_at_cuda(
    used: Iterable[int],
    pairs: Iterable[tuple[int, int]],
    probed: Iterable[int],
    *,
    command: Sequence[str] = COMMAND,
    limit_s: int | None = None,
) -> Cuda:
    """Ask about these devices, as `Question` has them. Takes no longer than it says, whatever the driver does."""
    probed = tuple(sorted(probed))
    limit_s = limit_s if limit_s is not None else LIMIT_S + PROBE_S * len(probed)
    question = Question(tuple(sorted(used)), tuple(sorted(pairs)), probed, 2 * limit_s)
    try:
        said = ask((*command, question.encode()), limit_s)
    except OSError as error:
        return Cuda(problem=f"{command[0]} cannot be started: {error.strerror}")
    try:
        found = _read(said.output.splitlines())
    except (ValueError, KeyError, TypeError, IndexError):
        return Cuda(problem=f"a look at the GPUs gave nonsense: {said.output.strip()[-100:]!r}")
    return found if found.problem else replace(found, problem=_ending(said, limit_s))


def _ending(said: Said, limit_s: int) -> str:
    if said.code is None:
        return f"the driver does not answer within {limit_s} s"
    if said.code < 0:
        return f"the process that asked the driver was ended by {signal.Signals(-said.code).name}"
    return f"the process that asked the driver failed: {said.last_words()}" if said.code else ""


def _read(lines: Iterable[str]) -> Cuda:
    """Lines that a driver prints beside those of the child begin otherwise."""
    found = Cuda()
    for line in lines:
        if line.startswith("{"):
            found = _with(found, json.loads(line))
    return found


def _with(found: Cuda, fact: dict[str, Any]) -> Cuda:
    if "library" in fact:
        return replace(found, library=str(fact["library"]))
    if "uuids" in fact:
        return replace(found, devices=tuple(Device(str(uuid)) for uuid in fact["uuids"]))
    if "reaches" in fact:
        pair = (int(fact["reader"]), int(fact["owner"]))
        return replace(found, reaches={**found.reaches, pair: bool(fact["reaches"])})
    if "facts" in fact:
        return replace(found, facts={**found.facts, int(fact["device"]): _facts(fact["facts"])})
    if "device" in fact:
        return _with_device(found, int(fact.pop("device")), fact)
    return replace(found, problem=str(fact["problem"]), code=fact["code"])


def _with_device(found: Cuda, number: int, fact: dict[str, Any]) -> Cuda:
    devices = list(found.devices)
    devices[number] = replace(devices[number], **fact)
    return replace(found, devices=tuple(devices))


def _facts(data: dict[str, Any]) -> Facts:
    probe = ProbeResult(**data["probe"]) if data["probe"] else None
    return Facts(bool(data["mig"]), tuple(data["without_peer_access"]), probe)
