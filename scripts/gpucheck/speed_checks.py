"""How fast the engine's steps are, with everything that a step is: the host's part, the copies, the draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from prelay_engine.attention import Span
from prelay_engine.gpu.model import GpuModel
from prelay_engine.kv import PagedKv
from prelay_engine.sampler import Draw
from prelay_queue.job import Sampling

from .found import Found, aimed, need, passed
from .networks import DEMO, EIGHT_B, Made, made
from .rig import Rig
from .texts import capture, prompt

#: What one H200 does: dense bfloat16 products that were measured, and its memory by the datasheet.
_FLOPS, _BYTES = 790e12, 4.8e12
_PREFILL_AIM, _DECODE_AIM, _BUSY_AIM, _EXACT_AIM = 0.4, 0.6, 0.8, 3.0
_BLOCK = 16
_GREEDY = Sampling(1 << 20, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and rows that are measured."""

    chunk: int
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    context: int


def _sizes(rig: Rig) -> Sizes:
    return rig.pick(Sizes(2048, (2048, 8192), (1, 32, 256), 1024), Sizes(16, (16, 24), (1, 2), 20))


def _network(rig: Rig, of: dict[str, Any]) -> Made:
    """One at a time: the other's memory is given back."""
    name, other = ("demo", "8B") if of is DEMO else ("8B", "demo")
    for each in (f"{other} store", other):
        rig.drop(each)
    return rig.once(name, lambda: made(rig, of))


def _store(rig: Rig, network: Made, name: str) -> PagedKv:
    """Room for the largest batch, full of numbers."""

    def make() -> PagedKv:
        sizes = _sizes(rig)
        per_row = -(-(sizes.context + 1) // _BLOCK)
        blocks = max(sizes.rows[-1] * per_row, -(-sizes.prompts[-1] // _BLOCK) + 1)
        store = network.usual.store(blocks, _BLOCK)
        for part in store.tensor.split(1024):
            part.normal_()
        rig.wait()
        return store

    return rig.once(f"{name} store", make)


def _prefill_s(rig: Rig, model: GpuModel, store: PagedKv, length: int, chunk: int) -> float:
    """Seconds for a prompt of `length` tokens, in chunks; the first token is drawn."""
    ids = prompt(model.vocab_size, length, 1)

    def run() -> None:
        for start in range(0, length, chunk):
            part = ids[start : start + chunk]
            last = [(len(part) - 1, Draw(_GREEDY, 0))] if start + len(part) == length else []
            step = model.step(store, [Span("prompt", start, len(part))], part, last, ())
            need(all(token >= 0 for token in step.tokens), "the logits hold a NaN")

    store.open("prompt", length, length)
    try:
        return rig.timed(run, warm_ups=2, repeats=3)
    finally:
        store.close("prompt")


def _flops(network: Made, length: int) -> float:
    """Of a prompt's prefill: two a weight and token, the last product for the last token only; and its attention."""
    shape = network.shape
    head = shape.vocab_size * shape.hidden_size
    products = 2.0 * ((network.weights - head) * length + head)
    layer = network.usual.layers[0]
    return products + 4.0 * shape.num_hidden_layers * layer.heads * layer.head_dim * length * (length + 1) / 2


def _prefill(rig: Rig, of: dict[str, Any], name: str) -> tuple[str, dict[str, float]]:
    network, sizes = _network(rig, of), _sizes(rig)
    store = _store(rig, network, name)
    parts, shares = [], {}
    for length in sizes.prompts:
        seconds = _prefill_s(rig, network.model(exact=False), store, length, sizes.chunk)
        shares[f"share_{length}"] = share = _flops(network, length) / seconds / _FLOPS
        shares[f"tokens_per_s_{length}"] = length / seconds
        parts.append(f"{length:,}: {length / seconds:,.0f} tok/s, {share:.0%}")
        rig.say(parts[-1])
    return "; ".join(parts), shares


def demo_prefill(rig: Rig) -> Found:
    figure, numbers = _prefill(rig, DEMO, "demo")
    need(all(number > 0 for number in numbers.values()), figure)
    return passed(figure, prefill=numbers)


def prefill(rig: Rig) -> Found:
    figure, numbers = _prefill(rig, EIGHT_B, "8B")
    least = min(number for name, number in numbers.items() if name.startswith("share"))
    return aimed(rig.rehearse or least >= _PREFILL_AIM, figure, prefill=numbers)


class Batch:
    """`rows` texts of `context` tokens, and the same decode step of all again and again."""

    def __init__(self, rig: Rig, store: PagedKv, rows: int, context: int, vocab: int) -> None:
        self._rig, self._store = rig, store
        self._keys = [f"row-{row}" for row in range(rows)]
        for key in self._keys:
            store.open(key, context + 1, context + 1)
        self._spans = [Span(key, context, 1) for key in self._keys]
        self._ids = prompt(vocab, rows, rows)
        self._draws = [(row, Draw(_GREEDY, 0)) for row in range(rows)]

    def step(self, model: GpuModel) -> list[int]:
        return model.step(self._store, self._spans, self._ids, self._draws, ()).tokens

    def seconds(self, model: GpuModel) -> float:
        tokens = self.step(model)
        need(all(token >= 0 for token in tokens), "the logits hold a NaN")
        return self._rig.timed(lambda: self.step(model), warm_ups=3, repeats=15)

    def close(self) -> None:
        for key in self._keys:
            self._store.close(key)


def _step_bytes(network: Made, rows: int, context: int) -> float:
    """What a decode step reads at least: every weight of a product, and the keys and values of all texts."""
    geometry = network.usual.geometry
    return network.weights * geometry.dtype.itemsize + rows * (context + 1) * geometry.token_bytes()


def _decode_ms(rig: Rig, model: GpuModel, store: PagedKv, rows: Sequence[int]) -> dict[int, float]:
    found = {}
    for count in rows:
        batch = Batch(rig, store, count, _sizes(rig).context, model.vocab_size)
        try:
            found[count] = 1000 * batch.seconds(model)
        finally:
            batch.close()
        rig.say(f"batch {count}: {found[count]:.2f} ms")
    return found


def _captured(rig: Rig, model: GpuModel, store: PagedKv, most: int) -> float:
    """Seconds that capturing all its steps of up to `most` rows took."""
    began = time.monotonic()
    model.decode_from(store, most, capture(rig))
    need("run without" not in repr(model._decoder), f"not all is captured: {model._decoder!r}")
    return time.monotonic() - began


def demo_decode(rig: Rig) -> Found:
    network, rows = _network(rig, DEMO), _sizes(rig).rows
    store, model = _store(rig, network, "demo"), network.model(exact=False)
    took = _captured(rig, model, store, rows[-1])
    graphs = _decode_ms(rig, model, store, rows)
    model._decoder = None
    eager = _decode_ms(rig, model, store, rows)
    figure = f"graphs {_listed(graphs)}; eager {_listed(eager)} ms; captured in {took:.1f} s"
    faster = all(graphs[count] <= 1.05 * eager[count] for count in rows)
    return aimed(rig.rehearse or faster, figure, "eager is faster", graphs=_named(graphs), eager=_named(eager))


def decode(rig: Rig) -> Found:
    network, sizes = _network(rig, EIGHT_B), _sizes(rig)
    store, model = _store(rig, network, "8B"), network.model(exact=False)
    took = _captured(rig, model, store, sizes.rows[-1])
    found = _decode_ms(rig, model, store, sizes.rows)
    rig.once("8B graphs", lambda: found)
    shares = {rows: _step_bytes(network, rows, sizes.context) / (ms / 1000) / _BYTES for rows, ms in found.items()}
    each = "; ".join(f"{rows}: {found[rows]:.2f} ms, {1000 * rows / found[rows]:,.0f} tok/s, {share:.0%}"
                     for rows, share in shares.items())  # fmt: skip
    reached = rig.rehearse or shares[sizes.rows[-1]] >= _DECODE_AIM
    return aimed(reached, f"{each}; captured in {took:.1f} s", ms=_named(found), shares=_named(shares), capture_s=took)


def eager(rig: Rig) -> Found:
    network, rows = _network(rig, EIGHT_B), _sizes(rig).rows
    store, model = _store(rig, network, "8B"), network.model(exact=False)
    decoder, model._decoder = model._decoder, None
    try:
        found = _decode_ms(rig, model, store, rows)
    finally:
        model._decoder = decoder
    graphs = rig.once("8B graphs", lambda: _graphs_ms(rig, model, store, rows))
    faster = all(graphs[count] <= 1.05 * found[count] for count in rows)
    return aimed(rig.rehearse or faster, f"{_listed(found)} ms, graphs {_listed(graphs)}", "eager is faster",
                 ms=_named(found))  # fmt: skip


def _graphs_ms(rig: Rig, model: GpuModel, store: PagedKv, rows: Sequence[int]) -> dict[int, float]:
    if model._decoder is None:
        _captured(rig, model, store, rows[-1])
    return _decode_ms(rig, model, store, rows)


def breakdown(rig: Rig) -> Found:
    """By the profiler: the time in kernels, and those that take most of it."""
    network, sizes = _network(rig, EIGHT_B), _sizes(rig)
    store, model, rows = _store(rig, network, "8B"), network.model(exact=False), sizes.rows[-1]
    if model._decoder is None:
        _captured(rig, model, store, rows)
    batch, steps = Batch(rig, store, rows, sizes.context, model.vocab_size), 5
    try:
        wall_ms = 1000 * batch.seconds(model)
        times = _profiled(rig, lambda: batch.step(model), steps)
    finally:
        batch.close()
    need(bool(times), "the profiler saw no kernel")
    busy = sum(times.values())
    top = sorted(times.items(), key=lambda item: -item[1])[:8]
    for name, ms in top:
        rig.say(f"{ms:8.3f} ms {ms / busy:5.1%}  {name[:100]}")
    figure = f"{wall_ms:.2f} ms, {busy:.2f} in kernels: " + ", ".join(
        f"{_brief(name)} {ms:.2f}" for name, ms in top[:4]
    )
    reached = rig.rehearse or busy >= _BUSY_AIM * wall_ms
    return aimed(
        reached, figure, "the host keeps the card waiting", wall_ms=wall_ms, busy_ms=busy, kernels_ms=dict(top)
    )


def _profiled(rig: Rig, run: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds a step, by kernel."""
    kind = ProfilerActivity.CPU if rig.rehearse else ProfilerActivity.CUDA
    with profile(activities=[kind]) as seen:
        for _ in range(rig.pick(steps, 1)):
            run()
        rig.wait()
    there = rig.pick("CUDA", "CPU")
    times = {}
    for event in seen.key_averages():
        micros = event.self_cpu_time_total if rig.rehearse else event.self_device_time_total
        if str(event.device_type).endswith(there) and micros > 0:
            times[event.key] = micros / 1000 / rig.pick(steps, 1)
    return times


def _brief(name: str) -> str:
    """A kernel's name without its templates and arguments."""
    plain = name.split("<")[0].split("(")[0].removeprefix("void ").split("::")[-1]
    return plain[:28] or name[:28]


def exact_cost(rig: Rig) -> Found:
    network, sizes = _network(rig, EIGHT_B), _sizes(rig)
    store, rows = _store(rig, network, "8B"), sizes.rows[:2]
    took: dict[str, float] = {}
    for exact in (False, True):
        model = network.model(exact=exact)
        # Graphs of one kind hold memory, and addresses that are good for the other as well: they go first.
        network.usual._decoder = network.exact._decoder = None
        rig.tidy()
        word = "exact" if exact else "usual"
        took[f"prefill, {word}"] = 1000 * _prefill_s(rig, model, store, sizes.prompts[0], sizes.chunk)
        _captured(rig, model, store, rows[-1])
        took |= {f"batch {count}, {word}": ms for count, ms in _decode_ms(rig, model, store, rows).items()}
    network.model(exact=False)
    names = ["prefill", *(f"batch {count}" for count in rows)]
    ratios = {name: took[f"{name}, exact"] / took[f"{name}, usual"] for name in names}
    figure = ", ".join(f"{name} {ratio:.2f} ×" for name, ratio in ratios.items())
    return aimed(rig.rehearse or max(ratios.values()) <= _EXACT_AIM, figure, ratios=ratios, ms=took)


def _listed(found: dict[int, float]) -> str:
    return " / ".join(f"{ms:.2f}" for ms in found.values())


def _named(found: dict[int, float]) -> dict[str, float]:
    return {str(rows): ms for rows, ms in found.items()}


RUNS = {
    "demo-prefill": demo_prefill,
    "demo-decode": demo_decode,
    "prefill": prefill,
    "decode": decode,
    "eager": eager,
    "breakdown": breakdown,
    "exact-cost": exact_cost,
}
