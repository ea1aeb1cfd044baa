"""Which GPUs there are, asked of the driver's own tool: importing torch for it would take seconds and 250 MB."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

from .ask import ask

#: How long the tool may take, in seconds; a driver that hangs must not hang us.
ANSWER_S = 10.0
_BRIEF = ("name", "memory.total", "driver_version")
_WHOLE = ("name", "memory.total", "memory.free", "driver_version", "uuid", "mig.mode.current", "compute_mode",
          "persistence_mode", "compute_cap")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU in the driver's words. Bytes, 0 where it does not say; `capability` is that of CUDA, as (9, 0)."""

    name: str
    uuid: str
    free: int = 0
    total: int = 0
    driver: str = ""
    has_mig: bool = False
    compute_mode: str = "Default"
    is_persistent: bool = True
    capability: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """A line for each GPU: name, memory, driver. `why` says why there is none.

    Where workers are to compute on them (`is_wanted`), `cards` tells more, and `seen` is how many CUDA sees.
    """

    lines: tuple[str, ...]
    why: str = ""
    cards: tuple[Card, ...] = ()
    is_wanted: bool = False
    seen: int = 0


def look_for_gpus() -> Gpus:
    return _asked(_BRIEF)


def look_at_cards() -> Gpus:
    """The same, with all that is known of each."""
    found = replace(_asked(_WHOLE), is_wanted=True)
    cards = tuple(_card(line) for line in found.lines)
    if not all(cards):
        return replace(found, lines=(), why="nvidia-smi gives another answer than was asked for")
    known = tuple(card for card in cards if card)
    lines = (f"{card.name}, {card.total >> 20} MiB, {card.driver}" for card in known)
    return replace(found, lines=tuple(lines), cards=known)


def _asked(fields: tuple[str, ...]) -> Gpus:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus((), "no nvidia-smi on PATH")
    try:
        said = ask((tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"), ANSWER_S)
    except OSError as error:
        return Gpus((), f"nvidia-smi cannot be run: {error.strerror}")
    if said.code is None:
        return Gpus((), f"nvidia-smi does not answer within {ANSWER_S:g} s")
    lines = tuple(line.strip() for line in said.output.splitlines() if line.strip())
    if said.code or not lines:
        words = (said.output + said.errors).strip().splitlines()
        return Gpus((), f"nvidia-smi: {words[0].strip() if words else f'exit code {said.code}'}")
    return Gpus(lines)


def _card(line: str) -> Card | None:
    """What a line of _WHOLE says, None when it has other fields."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_WHOLE):
        return None
    told = dict(zip(_WHOLE, parts, strict=True))
    return Card(
        told["name"],
        told["uuid"],
        _nbytes(told["memory.free"]),
        _nbytes(told["memory.total"]),
        told["driver_version"],
        told["mig.mode.current"] == "Enabled",
        told["compute_mode"],
        told["persistence_mode"] != "Disabled",
        tuple(int(part) for part in told["compute_cap"].split(".") if part.isdecimal()),
    )


def _nbytes(text: str) -> int:
    """Of "143771 MiB"; 0 of "[N/A]"."""
    number = text.partition(" ")[0]
    return int(number) << 20 if number.isdecimal() else 0
