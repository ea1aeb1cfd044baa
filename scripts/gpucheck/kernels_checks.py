"""Every Triton kernel against plain arithmetic in float64, and its rows against themselves, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import torch

from prelay_engine.gpu.kernels.decode import PARTS, split_keys
from prelay_engine.gpu.kernels.linear import linear
from prelay_engine.gpu.kernels.norm import rms_norm
from prelay_engine.gpu.kernels.silu import Name, silu_mul
from prelay_engine.gpu.kernels.tiles import Shape, single_rows
from prelay_engine.gpu.kernels.write_kv import write_kv

from .found import Found, need, passed
from .nearness import Worst, same
from .rig import Rig
from .sampling_checks import sample, sample_greedy, sample_rows
from .story import Form, Heads, Rows, Story

_PLAIN = Form()
_ALL = Form(window=50, softcap=2.0, sinks=True)
_FORMS = (_PLAIN, Form(window=1), Form(window=37), Form(softcap=0.7), Form(sinks=True), _ALL)


def _models(rig: Rig) -> list[tuple[Heads, tuple[Form, ...]]]:
    """Attention of several models, with what each is tried in: all forms for the first, two for the others."""
    if rig.rehearse:
        return [(Heads(rig.half, 16, 2, kv_heads=1), (_PLAIN,)), (Heads(torch.float32, 24, 3, 8, 1), (_ALL,))]
    two = (_PLAIN, _ALL)
    return [
        (Heads(rig.half, 128, 4, kv_heads=8), _FORMS),  # Llama 3
        (Heads(rig.half, 64, 3, kv_heads=3), two),  # SmolLM2
        (Heads(rig.half, 64, 8), two),  # GPT-OSS
        (Heads(rig.half, 256, 2), two),  # Gemma 2
        (Heads(rig.half, 80, 1, 64), (_PLAIN,)),
        (Heads(rig.half, 96, 7, 1), (_ALL,)),
        (Heads(torch.float16, 128, 4), (_PLAIN,)),
        (Heads(torch.float32, 64, 3), two),
        (Heads(torch.float32, 128, 4, 32), (_ALL,)),
    ]


def _two(rig: Rig, form: Form) -> tuple[Form, ...]:
    """The plain form and this one, in a rehearsal only this one: it has everything."""
    return rig.pick((_PLAIN, form), (form,))


def write(rig: Rig) -> Found:
    cases = [(rig.half, 8, 128, 16), (rig.half, 3, 64, 16), (torch.float16, 5, 80, 24), (torch.float32, 40, 256, 1)]
    for dtype, kv_heads, dim, size in rig.pick(cases, [(torch.float32, 3, 24, 4), (rig.half, 2, 16, 16)]):
        rows, blocks = 100, 300
        packed = rig.randn(rows, 3 * kv_heads, dim, dtype=dtype)
        keys, values = packed[:, :kv_heads], packed[:, 2 * kv_heads :]
        slots = torch.randperm(blocks * size, generator=rig.dice(1), device=rig.device)[:rows].contiguous()
        slots[::7] = -1
        pool = torch.full((blocks, 3, 2, kv_heads, size, dim), 7.0, dtype=dtype, device=rig.device)
        wanted = pool.clone()
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[slot // size, 1, 0, :, slot % size] = keys[row]
                wanted[slot // size, 1, 1, :, slot % size] = values[row]
        write_kv(pool, 1, keys, values, slots)
        same(pool, wanted, f"{dtype}, {kv_heads} heads of {dim}, blocks of {size}")
    return passed("every byte of the pools")


def attend(rig: Rig) -> Found:
    worst = Worst()
    lengths = rig.pick([1, 70, 200], [1, 20, 35])
    for heads, forms in _models(rig):
        told = Story(rig, heads, lengths)
        rows = [Rows(1, 0, lengths[1]), Rows(0, 0, 1), Rows(2, lengths[2] - 7, 7)]
        for form in forms:
            for exact in (False, True):
                found = told.attended(rows, form, exact=exact, padding=2)
                wanted = torch.cat([told.expected(each, form) for each in rows])
                worst.near(found[:-2], wanted, f"{heads}, {form}, exact={exact}")
                need(not bool(found[-2:].any()), f"{heads}, {form}: padding is not zero")
    return passed(str(worst))


def attend_long(rig: Rig) -> Found:
    worst = Worst()
    length, chunk = rig.pick((6000, 300), (90, 20))
    cases = [Heads(rig.half, 128, 4), Heads(rig.half, 64, 3), Heads(torch.float32, 64, 3)]
    for heads in rig.pick(cases, [Heads(rig.half, 16, 2, kv_heads=1)]):
        told = Story(rig, heads, [length, length // 2])
        rows = [Rows(0, length - chunk, chunk), Rows(1, 0, length // 4), Rows(0, length // 3, chunk)]
        for form in _two(rig, Form(window=length // 2, softcap=20.0, sinks=True)):
            found = told.attended(rows, form, exact=False)
            worst.near(found, torch.cat([told.expected(each, form) for each in rows]), f"{heads}, {form}")
    return passed(str(worst))


def attend_rows(rig: Rig) -> Found:
    count = rig.pick(1000, 40)
    cuts = rig.pick([0, 1, 16, 31, 64, 65, 99, 100, 511, 777, 999, 1000], [0, 1, 16, 31, 39, 40])
    single = rig.pick([0, 15, 63, 64, 500, 999], [0, 15, 39])
    cases = [Heads(rig.half, 128, 4), Heads(rig.half, 64, 3), Heads(rig.half, 256, 2), Heads(torch.float32, 64, 3)]
    for heads in rig.pick(cases, [Heads(rig.half, 16, 3, kv_heads=1)]):
        told = Story(rig, heads, [count, count - 20])
        for form in _two(rig, Form(window=count // 3, softcap=2.0, sinks=True)):
            what = f"{heads}, {form}"
            whole = told.attended([Rows(0, 0, count)], form, exact=True)
            chunks = [told.attended([Rows(0, a, b - a)], form, exact=True) for a, b in pairwise(cuts)]
            same(torch.cat(chunks), whole, f"{what}, in chunks")
            near, middle = count - 25, count // 2
            rows = [Rows(1, 3, near), Rows(0, 7, middle), Rows(1, 0, 3)]
            beside = told.attended(rows, form, exact=True, padding=3)
            same(beside[near : near + middle], whole[7 : 7 + middle], f"{what}, among others")
            laid = single_rows([*single, -1], Shape.of(heads.dim, heads.dtype, heads.group, True).rows(heads.group))
            alone = told.attended([Rows(0, place, 1) for place in single], form, exact=True, padding=1, laid=laid)
            same(alone[:-1], whole[single], f"{what}, as single rows")
    return passed("in chunks, among others, one by one")


def decode(rig: Rig) -> Found:
    worst = Worst()
    first, second = rig.pick((150, 9), (30, 5))
    for heads, forms in _models(rig):
        told = Story(rig, heads, [first, second])
        rows = [(0, first), (1, 0), (1, second), (0, first // 2), (0, 1)]
        for form in forms:
            found = told.decoded(rows, form)
            for row, (text, length) in enumerate(rows):
                what = f"{heads}, {form}, {length} keys"
                if length:
                    worst.near(found[row], told.expected(Rows(text, length - 1, 1), form)[0], what)
                else:
                    need(not bool(found[row].any()), f"{what}: padding is not zero")
    return passed(str(worst))


def decode_long(rig: Rig) -> Found:
    worst = Worst()
    cases = [Heads(rig.half, 128, 4), Heads(rig.half, 64, 3), Heads(rig.half, 256, 2), Heads(torch.float32, 64, 3)]
    for heads in rig.pick(cases, [Heads(torch.float32, 16, 2, kv_heads=1)]):
        split = split_keys(heads.dim, heads.dtype)
        ends = [1, split - 1, split, split + 1, PARTS * split, PARTS * split + 1, (PARTS + 2) * split + 3]
        lengths = rig.pick([*ends, 4097, 8000], [1, split, split + 1, (PARTS + 1) * split + 3])
        told = Story(rig, heads, [lengths[-1]])
        for form in _two(rig, Form(window=lengths[-1] // 2, softcap=20.0, sinks=True)):
            found = told.decoded([(0, length) for length in lengths], form)
            for row, length in enumerate(lengths):
                worst.near(
                    found[row], told.expected(Rows(0, length - 1, 1), form)[0], f"{heads}, {form}, {length} keys"
                )
    return passed(str(worst))


def decode_rows(rig: Rig) -> Found:
    long, short, few = rig.pick((3000, 400, 7), (60, 20, 5))
    cases = [Heads(rig.half, 128, 4), Heads(rig.half, 64, 3), Heads(torch.float32, 64, 3)]
    for heads in rig.pick(cases, [Heads(rig.half, 16, 3, kv_heads=1)]):
        told = Story(rig, heads, [long, short])
        for form in _two(rig, Form(window=long // 2, softcap=2.0, sinks=True)):
            rows = [(1, short), (0, long), (0, 0), (0, long // 2), (1, 1), *((0, long - i) for i in range(1, 60))]
            batch = told.decoded(rows[: rig.pick(64, 5)], form)
            for row in rig.pick((0, 1, 3, 4, 6), (1, 3)):
                same(told.decoded([rows[row]], form)[0], batch[row], f"{heads}, {form}, {rows[row][1]} keys, alone")
            back = told.decoded(list(reversed(rows[:few])), form)
            same(back, batch[:few].flip(0), f"{heads}, {form}, the other way round")
    return passed("alone, and in two orders")


def linear_values(rig: Rig) -> Found:
    worst = Worst()
    odd = [(1, 1, 1), (3, 64, 64), (130, 70, 33), (64, 65, 200), (300, 1536, 576)]
    large = [(128, 6144, 4096), (77, 28672, 4096), (256, 4096, 14336), (5, 128256, 4096)]
    for dtype in (torch.float32, *rig.halves):
        for rows, columns, depth in rig.pick(
            odd + large * (dtype == rig.half), [(1, 1, 1), (20, 17, 33), (70, 40, 64)]
        ):
            x, weight = rig.randn(rows, depth, dtype=dtype), rig.randn(columns, depth, seed=1, dtype=dtype)
            bias, wanted = rig.randn(columns, seed=2, dtype=dtype), x.double() @ weight.double().T
            what = f"{dtype}, {rows} × {columns} × {depth}"
            worst.near(linear(x, weight), wanted, what)
            worst.near(linear(x, weight, bias), wanted + bias.double(), f"{what}, with a bias")
    return passed(str(worst))


def linear_rows(rig: Rig) -> Found:
    shapes = rig.pick([(576, 576), (4096, 6144), (4096, 28672), (1000, 90)], [(40, 33), (64, 70)])
    counts = rig.pick([1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 256, 299], [1, 2, 17])
    for dtype in (rig.half, torch.float32):
        for depth, columns in shapes:
            most = rig.pick(300, 20)
            x, weight = rig.randn(most, depth, dtype=dtype), rig.randn(columns, depth, seed=1, dtype=dtype)
            together, what = linear(x, weight), f"{dtype}, {columns} × {depth}"
            for count in counts:
                same(linear(x[:count], weight), together[:count], f"{what}, the first {count}")
                same(linear(x[-count:], weight), together[-count:], f"{what}, the last {count}")
            order = torch.randperm(most, generator=rig.dice(3), device=rig.device)
            same(linear(x[order], weight), together[order], f"{what}, in another order")
    return passed(f"among {counts[0]} to {rig.pick(300, 20)}")


def norm(rig: Rig) -> Found:
    worst = Worst()
    for dtype in (torch.float32, *rig.halves):
        for shape in rig.pick([(300, 576), (77, 4096), (33, 14336), (200, 8, 128), (5, 3, 80)], [(9, 40), (5, 3, 24)]):
            x, weight = rig.randn(*shape, dtype=dtype) * 3, rig.randn(shape[-1], seed=1)
            wide = x.double()
            wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            found, what = rms_norm(x, weight, 1e-5), f"{dtype}, {shape}"
            worst.near(found, wanted, what)
            for row in (0, len(x) // 2, len(x) - 1):
                same(rms_norm(x[row : row + 1], weight, 1e-5)[0], found[row], f"{what}, row {row} alone")
    return passed(str(worst))


def silu(rig: Rig) -> Found:
    worst = Worst()
    names: tuple[Name, ...] = ("silu", "gelu", "gelu_tanh")
    for dtype in (torch.float32, *rig.halves):
        for rows, width in rig.pick([(300, 1536), (64, 14336), (1, 100)], [(5, 70)]):
            both = rig.randn(rows, 2 * width, dtype=dtype) * 3
            gate, up = both.double().split(width, 1)
            functional = torch.nn.functional
            wanted = {
                "silu": functional.silu(gate),
                "gelu": functional.gelu(gate),
                "gelu_tanh": functional.gelu(gate, approximate="tanh"),
            }
            for name in names:
                found = silu_mul(both, name)
                worst.near(found, wanted[name] * up, f"{name}, {dtype}, {rows} × {width}")
                same(silu_mul(both[-1:], name), found[-1:], f"{name}, {dtype}, the last row alone")
    return passed(str(worst))


RUNS = {
    "write-kv": write,
    "attend": attend,
    "attend-long": attend_long,
    "attend-rows": attend_rows,
    "decode": decode,
    "decode-long": decode_long,
    "decode-rows": decode_rows,
    "linear": linear_values,
    "linear-rows": linear_rows,
    "rms-norm": norm,
    "silu-mul": silu,
    "sample-greedy": sample_greedy,
    "sample": sample,
    "sample-rows": sample_rows,
}
