"""A whole model on the card: loaded, captured, disturbed, cut off, short of memory, in one process and in two."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from unittest.mock import patch

import torch

from prelay_engine.blocks import BlockPool
from prelay_engine.config import GpuConfig
from prelay_engine.errors import OutOfMemory
from prelay_engine.gpu import sizing
from prelay_engine.gpu.model import GpuModel
from prelay_engine.kv import PagedKv
from prelay_engine.sampler import Draw, sample
from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_queue.job import Sampling
from prelay_worker.config import Role

from .found import Found, Wrong, need, passed
from .networks import config, loaded, saved
from .peers import Partner
from .pools import importer
from .rig import Rig
from .texts import Answers, answers, capture, farthest, prompt, store_of, the_same
from .worker import engine_of, run_out, sequence

#: Standard deviations of logits that no rounding explains.
_FAR = 0.5


def load(rig: Rig) -> Found:
    folder = saved(rig)
    began = time.monotonic()
    model = loaded(rig, exact=False)
    return passed(f"{time.monotonic() - began:.1f} s; {model.how}; {model.exactness}", folder=str(folder))


def _prompts(rig: Rig, model: GpuModel, count: int) -> list[list[int]]:
    lengths = rig.pick((100, 33, 257, 16, 64, 180, 7, 129), (9, 5, 17, 16))
    return [prompt(model.vocab_size, lengths[text % len(lengths)], text) for text in range(count)]


def _store(rig: Rig, model: GpuModel) -> PagedKv:
    return rig.once("store", lambda: store_of(rig, model, rig.pick(1024, 24)))


def graphs(rig: Rig) -> Found:
    """In a bucket of just so many rows the same products run as eagerly, in a larger one others may.

    So there tokens are those of eager steps, here logits are as near as roundings leave them.
    """
    model, most = loaded(rig, exact=False), rig.pick(16, 2)
    model._decoder = None
    store, sizes, others = _store(rig, model), rig.pick((1, 2, 4, 8, 16), (1, 2)), rig.pick((3, 7, 13), ())
    tokens, prompts = rig.pick(12, 3), {count: _prompts(rig, model, count) for count in (*sizes, *others)}
    eager = {count: answers(model, store, prompts[count], tokens) for count in prompts}

    def compared(count: int, where: str) -> float:
        return _alike(answers(model, store, prompts[count], tokens), eager[count], f"{count} rows {where}")

    model.decode_from(store, most, None)
    told = [compared(count, "in buffers") for count in sizes]
    began = time.monotonic()
    model.decode_from(store, most, capture(rig))
    took = time.monotonic() - began
    need("run without" not in repr(model._decoder), f"not all is captured: {model._decoder!r}")
    told += [compared(count, "in a graph") for count in sizes]
    for count in others:
        off = farthest(answers(model, store, prompts[count], tokens, forced=eager[count]), eager[count])
        told.append(off)
        need(off < _FAR, f"{count} rows in a larger graph: logits {off:.2g} standard deviations off")
    need("replayed" in repr(model._decoder) and " 0 replayed" not in repr(model._decoder), "nothing was replayed")
    same = sum(off == 0 for off in told)
    figure = f"captured in {took:.1f} s; {same} of {len(told)} batches bit for bit, off by at most {max(told):.1g}"
    return passed(figure, capture_s=took, deviations=told)


def _alike(found: Answers, expected: Answers, what: str) -> float:
    """How far apart logits are, in standard deviations. Wrong if tokens differ, or no rounding explains it."""
    need(found.ids == expected.ids, f"{what}: tokens are {_first_difference(found.ids, expected.ids)}")
    off = farthest(found, expected)
    need(off < _FAR, f"{what}: logits {off:.2g} standard deviations off")
    return off


def among_writers(rig: Rig) -> Found:
    """Another process writes over blocks of this pool through its mapping, and a thread copies that one's into more."""
    model = loaded(rig, exact=False)
    blocks, mine = rig.pick((512, 128), (24, 12))
    shape = model.geometry
    layout = KvLayout(
        blocks,
        shape.layers,
        shape.kv_heads,
        16,
        shape.head_dim,
        str(shape.dtype).removeprefix("torch."),
        "1a2b",
        "3c4d",
    )
    place = str(rig.device)
    partner = Partner(rig.rehearse)
    pool = CudaPool.create(f"graphs-{os.getpid()}", layout, rig.runtime(), rig.index, torch_device=place)
    try:
        # The engine's blocks are the first of the pool, and the others are written by everybody else.
        tensor = pool.tensor[:mine]
        store = PagedKv(shape, BlockPool(mine), 16, tensor)
        model.decode_from(store, rig.pick(8, 1), capture(rig))
        prompts = _prompts(rig, model, rig.pick(8, 1))
        tokens = rig.pick(40, 3)
        quiet = answers(model, store, prompts, tokens)
        numbers = range(mine, mine + (blocks - mine) // 2)
        partner.ask("scribble", pool.ref(numbers, pool.generations[list(numbers)], 1).encode().decode())
        theirs = KvRef.decode(partner.ask("export", f"beside-{os.getpid()}", asdict(layout), 5).encode())
        with _copying(rig, pool, theirs, range(mine + (blocks - mine) // 2, blocks)) as copies:
            for again in range(rig.pick(3, 1)):
                the_same(answers(model, store, prompts, tokens), quiet, f"run {again + 1} among writers")
        written = partner.ask("rest")
        need(written > 0 and copies[0] > 0, "nobody wrote meanwhile")
        rig.wait()
        need(bool((pool.tensor[list(numbers)] == 3.0).all()), "the other process's writes did not arrive")
        return passed(f"{written} × {len(numbers)} blocks written meanwhile, {copies[0]} × copied")
    finally:
        model._decoder = None
        partner.end()
        pool.close()


@contextmanager
def _copying(rig: Rig, pool: CudaPool, theirs: KvRef, numbers: range) -> Iterator[list[int]]:
    """Inside, a thread copies a peer's blocks into these of the pool, as a decode worker's copy threads do."""
    stop, copies = threading.Event(), [0]
    failed: list[Exception] = []
    copier, imports = Copier(rig.runtime(), rig.index), importer(rig, pool.layout)
    nbytes, target = pool.layout.block_nbytes, pool.tensor.data_ptr()

    def copy(there: torch.Tensor, blocks: Sequence[int]) -> None:
        copier.copy(there.data_ptr(), blocks[: len(numbers)], target, numbers, nbytes)

    def work() -> None:
        try:
            while not stop.is_set():
                imports.fetch(theirs, copy)
                copies[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield copies
    finally:
        stop.set()
        thread.join()
        imports.close()
        copier.close()
        if failed:
            raise Wrong(f"copying meanwhile: {failed[0]}")


def sampled(rig: Rig) -> Found:
    model = loaded(rig, exact=False)
    store, count = _store(rig, model), rig.pick(8, 1)
    model.decode_from(store, count, capture(rig))
    prompts, tokens = _prompts(rig, model, count), rig.pick(20, 3)
    settings = [
        Sampling(
            tokens,
            temperature=0.6 + 0.2 * (text % 4),
            top_k=(0, 40)[text % 2],
            top_p=(1.0, 0.9)[text // 2 % 2],
            seed=text,
        )
        for text in range(count)
    ]
    found = answers(model, store, prompts, tokens, sampling=settings)
    need(answers(model, store, prompts, tokens, sampling=settings).ids == found.ids, "drawn again tokens differ")
    need(found.ids != answers(model, store, prompts, tokens).ids, "the settings change nothing")
    drawn = equal = 0
    for text, one in enumerate(settings):
        for seq, (row, token) in enumerate(zip(found.logits[text], found.ids[text], strict=True)):
            equal += sample(torch.from_numpy(row.copy())[None], [Draw(one, seq)])[0] == token
            drawn += 1
    need(equal >= 0.97 * drawn, f"only {equal} of {drawn} tokens are those the host draws from the same logits")
    return passed(f"{equal} of {drawn} tokens are the host's")


def out_of_memory(rig: Rig) -> Found:
    model = loaded(rig, exact=False)
    model._decoder = None
    store = _store(rig, model)
    prompts, tokens = _prompts(rig, model, 2), rig.pick(5, 2)
    before = answers(model, store, prompts, tokens)
    large = [prompt(model.vocab_size, rig.pick(8000, 60), 99)]
    rig.tidy()
    held = rig.free()
    before = answers(model, store, prompts, tokens)  # what this takes is kept, so small steps have room
    with _short_of_memory(rig, model):
        for _ in range(2):
            try:
                answers(model, store, large, 1)
            except OutOfMemory:
                continue
            raise Wrong("a step for which there was no memory said nothing")
        the_same(answers(model, store, prompts, tokens), before, "after it, while memory is short")
    rig.tidy()
    need(rig.rehearse or rig.free() > held - (512 << 20), "what it took was not given back")
    the_same(answers(model, store, prompts, tokens), before, "after it")
    long = answers(model, store, large, 1)
    need(len(long.ids[0]) == 1, "the large step does not work with room, either")
    return passed("raised twice; tokens after it are those before")


@contextmanager
def _short_of_memory(rig: Rig, model: GpuModel) -> Iterator[None]:
    """Inside, this process may take little more than it has: enough for small steps."""
    if rig.rehearse:

        def refuse(module: object, args: object, given: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
            if given["input_ids"].shape[1] > 40:
                raise torch.OutOfMemoryError("out of memory, as rehearsed")

        hook = model.net.register_forward_pre_hook(refuse, with_kwargs=True)
        yield
        hook.remove()
        return
    total = torch.cuda.get_device_properties(rig.device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(rig.device) + (32 << 20)) / total, rig.device
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, rig.device)


class _Everything:
    """In a rehearsal: a card of one GiB of which nothing is taken."""

    def __init__(self, device: torch.device) -> None:
        pass

    def start(self) -> int:
        return 0

    def peak(self) -> int:
        return 1 << 20

    def free_total(self) -> tuple[int, int]:
        return 4 << 30, 4 << 30


def memory_share(rig: Rig) -> Found:
    """A worker's start with 30 % of the card: what the card counts as taken then is no more, all others' included."""
    model = loaded(rig, exact=False)
    model._decoder = None
    rig.drop("store")
    share, running = 0.3, rig.pick(256, 2)
    settings = config(rig, saved(rig), exact=False, running=running, chunk=rig.pick(2048, 64))
    settings = replace(settings, gpu=GpuConfig(device=str(rig.device), memory_utilization=share))
    with patch.object(sizing, "CardMemory", _Everything) if rig.rehearse else nullcontext():
        blocks = sizing.kv_blocks(model, settings, decodes=True)
    need(blocks > 0, "no block")
    store = model.store(rig.pick(blocks, 40), 16)
    try:
        model.decode_from(store, running, capture(rig))
        need("run without" not in repr(model._decoder), f"not all is captured: {model._decoder!r}")
        answers(model, store, [prompt(model.vocab_size, settings.prefill_chunk - 1, 98)], 2)
        taken, total = _taken(rig)
    finally:
        model._decoder = None
    figure = f"{blocks} blocks; {taken / total:.1%} of the card taken, {share:.0%} allowed"
    need(taken <= share * total, figure)
    return passed(figure, blocks=blocks, taken=taken)


def _taken(rig: Rig) -> tuple[int, int]:
    """Of the card's bytes: those that are not free, and all."""
    rig.wait()
    if rig.rehearse:
        return 0, 1
    free, total = torch.cuda.mem_get_info(rig.device)
    return total - free, total


def exact(rig: Rig) -> Found:
    model = loaded(rig, exact=True)
    need(model.exact, f"the self-test: {model.exactness}")
    return passed(model.exactness)


def preempted(rig: Rig) -> Found:
    """Undisturbed alone, as graphs; then cut off after some tokens and prefilled anew in chunks, beside others."""
    model, tokens = loaded(rig, exact=True), rig.pick(32, 6)
    store = store_of(rig, model, rig.pick(1024, 40))
    model.decode_from(store, rig.pick(16, 4), capture(rig))
    try:
        text = prompt(model.vocab_size, rig.pick(200, 21), 1)
        drawn = Sampling(tokens, temperature=1.0, seed=3)
        whole = answers(model, store, [text], tokens, sampling=[drawn])
        need(len(set(whole.ids[0])) > tokens // 4, "the answer repeats itself: it would show little")
        for cut, chunk in rig.pick([(1, 64), (5, 37), (16, 1 << 20), (20, 128), (31, 7)], [(1, 8), (4, 1 << 20)]):
            others = _prompts(rig, model, rig.pick(5, 1))
            begun = [[*text, *whole.ids[0][:cut]], *others]
            seqs = [cut] + [0] * len(others)
            settings = [drawn, *(Sampling(tokens, temperature=0.0) for _ in others)]
            found = answers(model, store, begun, tokens - cut, chunk=chunk, sampling=settings, seqs=seqs)
            mine, rest = (
                Answers(found.ids[:1], found.logits[:1]),
                Answers([whole.ids[0][cut:]], [whole.logits[0][cut:]]),
            )
            the_same(mine, rest, f"cut off after {cut} tokens, chunks of {chunk}")
    finally:
        model._decoder = None
    return passed("tokens and logits, beside others, in chunks of 7 to all")


def hand_over(rig: Rig) -> Found:
    """As fleets do it: the same engines and transports, without a queue. All three compute the same batches."""
    folder, blocks = str(saved(rig)), rig.pick(128, 24)
    prefill, decode = (Partner(rig.rehearse, "worker") for _ in range(2))
    count, tokens = rig.pick((8, 24), (2, 3))
    try:
        engine, _, model = engine_of(rig, Role.UNIFIED, saved(rig), blocks, "auto")
        prompts = _prompts(rig, model, count)
        made = [sequence(number, each, tokens) for number, each in enumerate(prompts)]
        for each in made:
            engine.add(each)
        run_out(engine)
        expected = [each.ids for each in made]
        need(all(len(ids) == tokens for ids in expected), "the unified worker's answers are too short")
        decode.ask("load", "decode", folder, blocks, "auto", within_s=120)
        paths = []
        for path in ("cuda_ipc", "pinned"):
            prefill.ask("load", "prefill", folder, blocks, path, within_s=120)
            handed = prefill.ask("prefill", prompts, tokens)
            found = decode.ask("decode", prompts, tokens, handed)
            need(found == expected, f"by {path}: tokens are {_first_difference(found, expected)}")
            prefill.ask("close")
            paths.append(path)
        return passed(f"{count} × {tokens} tokens by {' and by '.join(paths)}")
    finally:
        prefill.end()
        decode.end()


def _first_difference(found: list[list[int]], expected: list[list[int]]) -> str:
    for text, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                return f"{a} and not {b} at {place} of text {text}"
    return "of another number"


RUNS = {
    "load": load,
    "graphs": graphs,
    "graphs-among-writers": among_writers,
    "sampled": sampled,
    "out-of-memory": out_of_memory,
    "memory-share": memory_share,
    "exact": exact,
    "preempted": preempted,
    "hand-over": hand_over,
}
