"""What is asked: prompts of random token ids, or the lines of a file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadUsage
from .lengths import Lengths


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the prompt as text or token ids, and the most tokens of its answer."""

    prompt: str | list[int]
    output: int


#: A level's number to its requests, endless. Different levels ask different things, so that no prefix cache helps.
Workload = Callable[[int], Iterator[Ask]]


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of random ids in [low, high), the first `shared` of them the same in all prompts of all levels."""

    input: Lengths
    output: Lengths
    shared: int
    seed: int
    ids: tuple[int, int]

    def __call__(self, level: int) -> Iterator[Ask]:
        prefix = np.random.default_rng([self.seed]).integers(*self.ids, self.shared).tolist()
        rng = np.random.default_rng([self.seed, level])
        while True:
            rest = max(1, self.input.draw(rng) - self.shared)  # of equal prompts all but the first would cost nothing
            yield Ask(prefix + rng.integers(*self.ids, rest).tolist(), self.output.draw(rng))


@dataclass(frozen=True, slots=True)
class FilePrompts:
    """The lines of a file in their order, again and again. Each level goes on where the one before it stopped."""

    lines: tuple[dict[str, Any], ...]
    output: Lengths
    seed: int
    _place: Iterator[int]

    def __call__(self, level: int) -> Iterator[Ask]:
        rng = np.random.default_rng([self.seed, level])
        for at in self._place:
            line = self.lines[at % len(self.lines)]
            yield Ask(line["prompt"], line.get("output_len") or self.output.draw(rng))


def read_file(path: Path, output: Lengths, seed: int) -> FilePrompts:
    """Read JSON lines of {"prompt": text or token ids, "output_len": tokens, optional}. Raise BadUsage."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"--dataset: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    lines = tuple(
        _line(line, f"--dataset {path}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    )
    if not lines:
        raise BadUsage(f"--dataset {path} is empty")
    return FilePrompts(lines, output, seed, itertools.count())


def _line(raw: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError as error:
        raise BadUsage(f"{where}: not valid JSON ({error})") from None
    if not isinstance(line, dict) or not _is_prompt(line.get("prompt")):
        raise BadUsage(f'{where}: needs "prompt", a text or a list of token ids')
    output = line.get("output_len")
    if output is not None and not (_is_count(output) and output > 0):
        raise BadUsage(f'{where}: "output_len" must be a whole number of at least 1, not {json.dumps(output):.40}')
    return line


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_count, value))
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_ids(text: str) -> tuple[int, int]:
    """Read "100-30000". Raise BadUsage."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise BadUsage(f"--token-ids must be LOW-HIGH, not {text!r}")
    return int(found[1]), int(found[2])


def chosen(dataset: str | None, input_: Lengths, output: Lengths, shared: int, seed: int, token_ids: str) -> Workload:
    """The workload that the options name. Raise BadUsage."""
    if dataset is None:
        return RandomPrompts(input_, output, shared, seed, parse_ids(token_ids))
    if shared:
        raise BadUsage("--shared-prefix is for random prompts: those of --dataset share what they share")
    return read_file(Path(dataset), output, seed)
