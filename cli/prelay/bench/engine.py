"""`prelay bench engine`: the raw loop on a model, without a queue, and what loading it takes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CliError
from ..host import size
from ..pdeath import dying
from . import facts
from .output import Report, Sheet, Wanted, deliver
from .plot import Panel
from .process import environment
from .progress import Tell, progress


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `random_bytes`: load a random model of that size as well."""

    model: Path
    dtype: str = "auto"
    kernels: str = "auto"
    quantization: str = "none"
    threads: int = 1
    batches: Sequence[int] = (1, 8, 32)
    prompt: int = 128
    steps: int = 64
    prefills: Sequence[int] = (128, 512, 1024)
    runs: int = 3
    prefill_chunk: int = 256
    cold: bool = False
    random_bytes: int | None = None
    words: dict[str, Any] = field(default_factory=dict)

    def settings(self, model: Path) -> dict[str, Any]:
        """Those of EngineConfig, as JSON can carry them."""
        chosen = {name: getattr(self, name) for name in ("dtype", "kernels", "quantization", "threads")}
        return {"model": str(model), "prefill_chunk": self.prefill_chunk} | chosen


def run(plan: Plan, wanted: Wanted, notes: Sequence[str]) -> int:
    """Measure and report. Return 0, or 130 when it was interrupted, with what was measured until then.

    Raise CliError when the model cannot be loaded.
    """
    wanted.check()
    found = facts.begin(notes)
    data: dict[str, Any] = {"bench": "engine", "facts": found, "settings": plan.words, "interrupted": False}
    data |= {"loads": [], "prefill": [], "decode": []}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both leave in order
    try:
        with progress() as tell:
            _measure(plan, data, tell)
    except KeyboardInterrupt:
        data["interrupted"] = True
    facts.finish(found)
    data["engine"] = {"mode": "raw loop, no queue", "threads": plan.threads} | _of_first(data["loads"])
    deliver(Report(_title(data), data, lambda: list(_sheets(data)), lambda: _panels(data)), wanted)
    return 130 if data["interrupted"] else 0


def _measure(plan: Plan, data: dict[str, Any], tell: Tell) -> None:
    """Each part in a process of its own: what one has held must not be in the memory of the next."""
    settings = {"settings": plan.settings(plan.model), "cold": plan.cold}
    loop = {"batches": list(plan.batches), "prompt": plan.prompt, "steps": plan.steps}
    loop |= {"prefills": list(plan.prefills), "runs": plan.runs}
    _in_child({"task": "loop"} | settings | loop, plan.threads, data, tell)
    if plan.random_bytes is not None:
        with tempfile.TemporaryDirectory(prefix="prelay-bench-") as folder:
            model = Path(folder) / "random"
            write = {"task": "write_model", "folder": str(model), "nbytes": plan.random_bytes}
            _in_child(write, plan.threads, data, tell)
            load = {"task": "load_only", "settings": plan.settings(model), "cold": plan.cold}
            _in_child(load, plan.threads, data, tell)


def _in_child(task: dict[str, Any], threads: int, data: dict[str, Any], tell: Tell) -> None:
    """Run one task and put the figures it says into `data`. Raise CliError with its words when it fails."""
    command = dying(signal.SIGKILL, sys.executable, "-P", "-m", "prelay.bench.child", json.dumps(task))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment(threads), start_new_session=True,
        )  # fmt: skip
        try:
            said = _listen(process, data, tell)
        finally:
            process.kill()
            code = process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if said is not None:
            raise CliError(said)
        if code not in (0, -signal.SIGKILL):
            errors.seek(0)
            raise CliError(f"the measurement failed: {(errors.read().strip().splitlines() or ['without a word'])[-1]}")


def _listen(process: subprocess.Popen[str], data: dict[str, Any], tell: Tell) -> str | None:
    """Follow a child to its end. Return its error, if it says one."""
    assert process.stdout is not None
    problem = None
    for line in process.stdout:
        message = json.loads(line)
        if "tell" in message:
            tell(*message["tell"])
        for group, rows in message.get("figures", {}).items():
            data.setdefault(group, []).extend(rows)
        problem = message.get("error", problem)
    process.wait()
    return problem


def _of_first(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: loads[0][name] for name in ("model", "dtype", "kernels", "exact", "exactness")} if loads else {}


def _title(data: dict[str, Any]) -> str:
    about = data["engine"]
    words = [f"{name} {about[name]}" for name in ("dtype", "kernels", "threads", "exact") if name in about]
    return ", ".join([f"prelay bench engine: {about.get('model', 'not loaded')}", *words])


def _sheets(data: dict[str, Any]) -> Iterator[Sheet]:
    yield (
        "decode steps",
        ["batch", "sampling", "step ms p50", "p99", "tokens/s", "sampler ms p50", "its share"],
        [
            [row["batch"], row["sampling"], row["step_ms"]["p50"], row["step_ms"]["p99"], row["tokens_per_s"],
             row["sampler_ms"]["p50"], f"{row['sampler_share']:.1%}"]
            for row in data["decode"]
        ],
    )  # fmt: skip
    prompts = [[row["tokens"], row["ms"], row["tokens_per_s"]] for row in data["prefill"]]
    yield "prefill", ["prompt tokens", "ms", "tokens/s"], prompts
    headings = ["model", "files", "weights", "seconds", "CPU s", "before", "peak", "after"]
    yield "loading", headings, [_loading(row) for row in data["loads"]]
    for row in data.get("peak_running", ()):
        yield "", ["memory", "bytes"], [["most while it ran", size(row["bytes"])]]


def _loading(row: dict[str, Any]) -> list[object]:
    names = ("files", "weights", "rss_before", "peak_loading", "rss_after")
    files, weights, before, peak, after = (size(row[f"{n}_bytes"]) if row[f"{n}_bytes"] else None for n in names)
    return [row["model"], files, weights, row["load_s"], row["load_cpu_s"], before, peak, after]


def _panels(data: dict[str, Any]) -> list[Panel]:
    kinds = list(dict.fromkeys(row["sampling"] for row in data["decode"]))

    def lines(figure: str, part: str = "") -> list[tuple[str, list[tuple[float, float]]]]:
        rows = sorted(data["decode"], key=lambda row: int(row["batch"]))
        return [
            (kind, [(r["batch"], r[figure][part] if part else r[figure]) for r in rows if r["sampling"] == kind])
            for kind in kinds
        ]

    prompts = sorted((float(row["tokens"]), float(row["tokens_per_s"])) for row in data["prefill"])
    return [
        Panel("decode step, median", "batch", "milliseconds", lines("step_ms", "p50"), even=True),
        Panel("decode", "batch", "tokens a second", lines("tokens_per_s"), even=True),
        Panel("sampler, median of a step", "batch", "milliseconds", lines("sampler_ms", "p50"), even=True),
        Panel("prefill", "prompt tokens", "tokens a second", [("one prompt at a time", prompts)], even=True),
    ]
