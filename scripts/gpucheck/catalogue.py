"""Everything that is checked, in the order in which it is: the most valuable first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """`share` of the time, against those of the other parts; `jobs` processes that take its checks at once."""

    name: str
    share: int
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Check:
    """`takes_s`: seconds on a card, roughly and rather too much: with fewer left it is not begun."""

    part: str
    name: str
    what: str
    aim: str = ""
    takes_s: int = 5

    @property
    def full_name(self) -> str:
        return f"{self.part}.{self.name}"


PARTS = (Part("ipc", 85), Part("kernels", 105, jobs=4), Part("model", 115), Part("speed", 115))

CHECKS = (
    Check("ipc", "copy", "another process maps the pool and copies every block, byte for byte", takes_s=25),
    Check("ipc", "contiguous", "hand-over of 64 MiB to 4 GiB in neighbouring blocks of 2 MiB", "≥ 1 TB/s", 5),
    Check("ipc", "scattered", "the same in blocks that lie anywhere on both sides", "≥ 1 TB/s", 5),
    Check("ipc", "exporter-killed", "killed while mapped: reads go on, its memory stays until it is unmapped"),
    Check("ipc", "importer-killed", "killed while it maps: the exporter works on and closes, and memory is free"),
    Check("ipc", "writer-killed", "killed in the middle of overwriting: what was raised is refused, the rest is whole"),
    Check("ipc", "own-handle", "a process cannot open its own handle: error 201, with advice"),
    Check("ipc", "probe", "the probe of the start finds that memory can be mapped, and chooses cuda_ipc", takes_s=8),
    Check("ipc", "pinned", "through pinned host memory: Mirror and PinnedMapping, byte for byte"),
    Check("kernels", "write-kv", "write_kv writes its rows and nothing else, in four dtypes and shapes"),
    Check("kernels", "attend", "attend against float64: head sizes, groups, blocks, windows, caps, sinks", takes_s=30),
    Check("kernels", "attend-long", "attend in chunks behind up to 6,000 keys, against float64", takes_s=15),
    Check("kernels", "attend-rows", "exact attend: a row has the same bits alone, in chunks, among others", takes_s=10),
    Check("kernels", "decode", "decode against float64: the same forms", takes_s=30),
    Check("kernels", "decode-long", "decode over 1 to 8,000 keys, against float64", takes_s=10),
    Check("kernels", "decode-rows", "decode: a row has the same bits alone and among others", takes_s=10),
    Check("kernels", "linear", "linear against float64: three dtypes, odd shapes, those of an 8B model", takes_s=15),
    Check("kernels", "linear-rows", "linear: a row has the same bits among 1 to 300", takes_s=10),
    Check("kernels", "rms-norm", "rms_norm against float64, and the same bits alone, of rows and of heads"),
    Check("kernels", "silu-mul", "silu_mul against float64, with three activations"),
    Check("kernels", "sample-greedy", "sample takes the greatest logit, of equals the first; no token for NaN"),
    Check("kernels", "sample", "sample draws what the sampler on the host draws, with all settings", takes_s=15),
    Check("kernels", "sample-rows", "sample: a row's token is the same alone and among others"),
    Check("model", "load", "a model of SmolLM2-135M's shape is loaded, agrees with transformers, passes its self-test",
          takes_s=40),
    Check("model", "graphs", "decode steps as CUDA graphs: the tokens of eager ones", takes_s=15),
    Check("model", "exact", "in exact mode the self-test finds no bit that depends on a neighbour", takes_s=20),
    Check("model", "preempted", "in exact mode answers taken up at several places are those undisturbed, bit for bit",
          takes_s=20),
    Check("model", "hand-over", "prefill in one process, decode in another: the tokens of a unified one", takes_s=40),
    Check("model", "graphs-among-writers", "the same while other processes write other blocks of the pool", takes_s=15),
    Check("model", "sampled", "temperature, top_k and top_p in a graph draw what the host draws", takes_s=5),
    Check("model", "out-of-memory", "a step without room raises OutOfMemory; the next one is right"),
    Check("model", "memory-share", "the KV blocks that a share of the card leaves room for do fit in it, graphs too",
          takes_s=15),
    Check("speed", "demo-prefill", "135M: prefill of 2,048 and 8,192 tokens in chunks of 2,048", takes_s=12),
    Check("speed", "demo-decode", "135M: decode steps at batch 1, 32, 256 over 1,024 tokens, graphs and eager",
          "graphs ≥ eager", 15),
    Check("speed", "prefill", "8B: prefill of 2,048 and 8,192 tokens in chunks of 2,048", "≥ 40 % of 790 TFLOP/s", 25),
    Check("speed", "decode", "8B: decode steps at batch 1, 32, 256 over 1,024 tokens each, as graphs",
          "≥ 60 % of 4.8 TB/s at 256", 20),
    Check("speed", "eager", "8B: the same without graphs", "graphs ≥ eager", 5),
    Check("speed", "breakdown", "8B: what one decode step at batch 256 is made of", "kernels ≥ 80 % of the step", 8),
    Check("speed", "exact-cost", "8B: prefill and decode in exact mode, times the usual", "≤ 3 times", 20),
)  # fmt: skip


def names() -> tuple[str, ...]:
    return tuple(part.name for part in PARTS)


def of(part: str) -> list[Check]:
    return [check for check in CHECKS if check.part == part]


def check_of(full_name: str) -> Check:
    return next(check for check in CHECKS if check.full_name == full_name)
