"""Which GPUs there are, asked of the driver's own tool: importing torch for it would take seconds and 250 MB."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

#: How long the tool may take, in seconds; a driver that hangs must not hang us.
ANSWER_S = 10.0
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Gpus:
    """A line for each GPU: name, memory, driver. `why` says why there is none."""

    lines: tuple[str, ...]
    why: str = ""


def look_for_gpus() -> Gpus:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus((), "no nvidia-smi on PATH")
    try:
        done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return Gpus((), f"nvidia-smi does not answer within {ANSWER_S:g} s")
    except OSError as error:
        return Gpus((), f"nvidia-smi cannot be run: {error.strerror}")
    lines = tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    if done.returncode or not lines:
        said = (done.stdout + done.stderr).strip().splitlines()
        return Gpus((), f"nvidia-smi: {said[0].strip() if said else f'exit code {done.returncode}'}")
    return Gpus(lines)
