"""From logits to tokens on the device: what prelay_engine.sampler does on the host.

A row's weights are e^((logit - peak) / temperature), so the heaviest weighs 1. top_k and top_p leave those above a
bar, and of those at it the first few. The bar is found without sorting: the bits of numbers that are not negative,
read as an integer, grow with the number, so they are settled one after the other by counting or adding up what reaches
them. Only weights that may matter are looked at so often: they are listed before.

Everything is computed by one program a row, over tiles in rising order; weights are added up in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

#: Logits that a program works on at a time.
_TILE = 8192
_WARPS = 16


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    point: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
) -> None:
    """One token for each row of logits [rows, vocab], into out [rows].

    logits: float32, rows at any stride, each contiguous; they are only read
    temperature: float32 [rows]; 0 takes the greatest logit, of equals the first
    top_k: int32 [rows]; 0 or less: all; 1 takes the greatest
    top_p: float64 [rows]; 1 or more: all
    min_p: float32 [rows]; 0: all
    point: float64 [rows], in [0, 1): where among the weights left, laid side by side by rising id
    out: int64 [rows]; -1 where a row has a NaN or no finite greatest logit
    scratch: float32, at least [rows, vocab], each row contiguous, not logits; without it, one is allocated

    With scratch nothing is allocated, and nothing is waited for: it can be captured into a CUDA graph, once it has been
    called with the same vocabulary outside of a capture. A row's token depends on that row only.
    """
    rows, vocab = logits.shape
    scratch = torch.empty(rows, vocab, device=logits.device) if scratch is None else scratch
    _check(logits, (temperature, top_k, top_p, min_p, point, out), scratch)
    if rows == 0:
        return
    _sample[(rows,)](
        logits, temperature, top_k, top_p, min_p, point, out, scratch, vocab, logits.stride(0), scratch.stride(0),
        TILE=_TILE, TILES=triton.next_power_of_2(triton.cdiv(vocab, _TILE)),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _check(logits: torch.Tensor, each: tuple[torch.Tensor, ...], scratch: torch.Tensor) -> None:
    rows, vocab = logits.shape
    single, double = torch.float32, torch.float64
    assert logits.dtype == scratch.dtype == single
    assert logits.stride(1) == scratch.stride(1) == 1
    assert scratch.shape[0] >= rows
    assert scratch.shape[1] >= vocab
    assert [one.dtype for one in each] == [single, torch.int32, double, single, double, torch.int64]
    assert all(one.shape == (rows,) and one.is_contiguous() for one in each)


@triton.jit  # type: ignore[untyped-decorator]
def _sample(
    logits: tensor, temperature: tensor, top_k: tensor, top_p: tensor, min_p: tensor, point: tensor, out: tensor,
    scratch: tensor, vocab: tensor, logits_row: tensor, scratch_row: tensor, TILE: tl.constexpr, TILES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    heat, count, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)

    high, peak, token = _peak(logits, vocab, TILE)
    if (token >= 0) & (heat != 0.0) & (count != 1):
        slope = 1.0 / tl.maximum(heat, 1.1754943508222875e-38)  # a float32 cannot be divided by less without loss
        least = tl.load(min_p + row)
        bar, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + vocab
        if ((count > 0) & (count < vocab)) | (share < 1.0):
            listed = scratch + row * scratch_row
            bar, ties, left = _bar(logits, listed, vocab, high, peak, slope, least, count, share, TILE)
            if left < ties:
                last = _nth_tie(logits, vocab, peak, slope, least, bar, left, TILE)
        token = _pick(logits, vocab, peak, slope, least, bar, last, tl.load(point + row), TILE, TILES)
    tl.store(out + row, token.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _peak(logits: tensor, vocab: tensor, TILE: tl.constexpr) -> tensor:
    """The greatest logit of each lane [TILE], that of all, and where it stands first: -1 for NaN or nothing finite."""
    lane = tl.arange(0, TILE)
    high = tl.full((TILE,), float("-inf"), tl.float32)
    first = tl.full((TILE,), 0, tl.int32)
    odd = tl.full((TILE,), 0, tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=2):
        logit = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf"))
        odd |= (logit != logit).to(tl.int32)
        first = tl.where(logit > high, start + lane, first)
        high = tl.where(logit > high, logit, high)
    peak = tl.max(high, axis=0)
    token = tl.min(tl.where(high == peak, first, vocab), axis=0)
    sound = (tl.max(odd, axis=0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    return high, peak, tl.where(sound, token, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(logit: tensor, peak: tensor, slope: tensor, least: tensor) -> tensor:
    """A weight is computed anew wherever it is compared with the bar: always by this, so always to the same bits."""
    weight = tl.exp((logit - peak) * slope)
    return tl.where(weight < least, 0.0, weight)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    logits: tensor, start: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, TILE: tl.constexpr
) -> tensor:
    """The weights of a tile of ids; 0 beyond the last."""
    token = start + tl.arange(0, TILE)
    logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    return _weights(logit, peak, slope, least)


@triton.jit  # type: ignore[untyped-decorator]
def _bits(weight: tensor) -> tensor:
    return weight.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _bar(
    logits: tensor, listed: tensor, vocab: tensor, high: tensor, peak: tensor, slope: tensor, least: tensor,
    count: tensor, share: tensor, TILE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The bits of the lightest weight that is left, how many weigh just that, and how many of those are left."""
    # 1. A floor under the bar, and a list of what reaches it.
    whole = tl.full((), 0.0, tl.float64)
    limited = (count > 0) & (count < vocab)
    if limited:
        # The greatest of each lane are weights of the row: as many as asked for reach the nth of these.
        floor = _nth(_bits(_weights(high, peak, slope, least)), count)
    else:
        # All below this make up at most half of what top_p leaves out.
        whole = _whole(logits, vocab, peak, slope, least, TILE)
        floor = _bits(((1.0 - share) * whole / (2.0 * vocab)).to(tl.float32))
    length = _list(logits, listed, vocab, peak, slope, least, tl.maximum(floor, 1), TILE)

    # 2. What top_k leaves.
    bar = tl.full((), 1, tl.int32)
    if limited:
        bar = tl.maximum(_highest(listed, length, count, 0.0, TILE), 1)
    reached, _ = _reach(listed, length, bar, TILE)
    above, sum_above = _reach(listed, length, bar + 1, TILE)
    ties = reached - above
    left = ties
    if limited:
        left = tl.minimum(ties, count - above)
        whole = sum_above + left * bar.to(tl.float32, bitcast=True).to(tl.float64)

    # 3. What top_p leaves of that: the fewest that make up the share. The heaviest weighs 1, and always stays.
    if share < 1.0:
        goal = tl.maximum(share * whole, 1.0)
        nucleus = tl.maximum(_highest(listed, length, 1, goal, TILE), bar)
        reached, _ = _reach(listed, length, nucleus, TILE)
        above, sum_above = _reach(listed, length, nucleus + 1, TILE)
        ties = reached - above
        left = tl.where(nucleus == bar, left, ties)
        weight = nucleus.to(tl.float32, bitcast=True).to(tl.float64)
        wanted = tl.floor((goal - sum_above) / weight)
        wanted += (sum_above + wanted * weight < goal).to(tl.float64)  # the quotient was rounded
        left = tl.maximum(tl.minimum(wanted, left.to(tl.float64)).to(tl.int32), 1)
        bar = nucleus
    return bar, ties, left


@triton.jit  # type: ignore[untyped-decorator]
def _nth(bits: tensor, n: tensor) -> tensor:
    """The nth greatest of a tensor of weights' bits, which are below 2^30; 0 if there are fewer."""
    bar = tl.full((), 0, tl.int32)
    for step in range(30):
        raised = bar | (1 << (29 - step))
        bar = tl.where(tl.sum((bits >= raised).to(tl.int32), axis=0) >= n, raised, bar)
    return bar


@triton.jit  # type: ignore[untyped-decorator]
def _whole(logits: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, TILE: tl.constexpr) -> tensor:
    sums = tl.full((TILE,), 0.0, tl.float64)
    for start in tl.range(0, vocab, TILE, num_stages=2):
        sums += _tile(logits, start, vocab, peak, slope, least, TILE).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _list(
    logits: tensor, listed: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, floor: tensor,
    TILE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Store all weights that reach the floor, by rising id. Returns how many."""
    length = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=2):
        weight = _tile(logits, start, vocab, peak, slope, least, TILE)
        found = (_bits(weight) >= floor).to(tl.int32)
        tl.store(listed + length + tl.cumsum(found, axis=0) - 1, weight, mask=found > 0)
        length += tl.sum(found, axis=0)
    tl.debug_barrier()  # other threads read what these have written
    return length


@triton.jit  # type: ignore[untyped-decorator]
def _reach(listed: tensor, length: tensor, bar: tensor, TILE: tl.constexpr) -> tensor:
    """How many of the listed weights reach the bar, and their sum."""
    counts = tl.full((TILE,), 0, tl.int32)
    sums = tl.full((TILE,), 0.0, tl.float64)
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        weight = tl.load(listed + place, mask=place < length, other=0.0)
        reaches = _bits(weight) >= bar
        counts += reaches.to(tl.int32)
        sums += tl.where(reaches, weight, 0.0).to(tl.float64)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _highest(listed: tensor, length: tensor, count: tensor, goal: tensor, TILE: tl.constexpr) -> tensor:
    """The highest bar that at least `count` listed weights reach, which make up at least `goal`; 0 if they do not."""
    bar = tl.full((), 0, tl.int32)
    for step in range(30):
        raised = bar | (1 << (29 - step))
        reached, total = _reach(listed, length, raised, TILE)
        bar = tl.where((reached >= count) & (total >= goal), raised, bar)
    return bar


@triton.jit  # type: ignore[untyped-decorator]
def _nth_tie(
    logits: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, bar: tensor, n: tensor,
    TILE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The id of the nth of those that weigh just the bar."""
    seen = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=2):
        tie = (_bits(_tile(logits, start, vocab, peak, slope, least, TILE)) == bar).to(tl.int32)
        before = tl.where(seen < n, seen, before)
        found = tl.where(seen < n, start, found)
        seen += tl.sum(tie, axis=0)
    tie = (_bits(_tile(logits, found, vocab, peak, slope, least, TILE)) == bar).to(tl.int32)
    return found + tl.sum((tl.cumsum(tie, axis=0) < n - before).to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _pick(
    logits: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, bar: tensor, last: tensor, point: tensor,
    TILE: tl.constexpr, TILES: tl.constexpr,
) -> tensor:  # fmt: skip
    """The id at which the share `point` of the weights left is passed: by tiles, then within one."""
    number = tl.arange(0, TILES)
    sums = tl.full((TILES,), float("inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    for start in tl.range(0, vocab, TILE, num_stages=2):
        weight = _left(logits, start, vocab, peak, slope, least, bar, last, TILE)
        total += tl.sum(weight.to(tl.float64), axis=0)
        sums = tl.where(number == start // TILE, total, sums)
    # Below the total whatever the point is and however products are rounded: so a tile passes it.
    target = tl.minimum(point * total, (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True))
    tile = tl.sum((sums <= target).to(tl.int32), axis=0)
    before = tl.max(tl.where(number < tile, sums, 0.0), axis=0)
    token = tile * TILE + tl.arange(0, TILE)
    weight = _left(logits, tile * TILE, vocab, peak, slope, least, bar, last, TILE)
    passed = (before + tl.cumsum(weight.to(tl.float64), axis=0) > target) & (weight > 0.0)
    # Two ways of adding the same weights may differ in the last bit: then the last one is meant.
    final = tl.max(tl.where(weight > 0.0, token, 0), axis=0)
    return tl.min(tl.where(passed, token, final), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _left(
    logits: tensor, start: tensor, vocab: tensor, peak: tensor, slope: tensor, least: tensor, bar: tensor, last: tensor,
    TILE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The weights of a tile of ids; 0 for those that top_k and top_p do not leave."""
    weight = _tile(logits, start, vocab, peak, slope, least, TILE)
    bits = _bits(weight)
    return tl.where((bits > bar) | ((bits == bar) & (start + tl.arange(0, TILE) <= last)), weight, 0.0)
