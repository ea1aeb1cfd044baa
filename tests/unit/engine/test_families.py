"""Every family of models that is served, tiny and random: transformers' own logits, and one set of bits.

The reference is each class's own forward with its own attention (eager), in float32. Windows are shorter than the
text, experts are fewer than its tokens, and the sizes are no multiples of anything that a kernel likes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prelay_engine.attention import Span
from prelay_engine.config import EngineConfig, KernelsChoice
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.errors import NoRoom
from prelay_engine.kv import KvStore
from prelay_engine.loading import load
from prelay_engine.model import Model
from prelay_engine.sequence import Sequence
from prelay_queue.job import Sampling

from .conftest import MakeFolder, contiguous, paged

LENGTH = 150
WINDOW = 40
IDS = torch.randint(3, 300, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
ROPE = {"rope_theta": 10000.0}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
SMALL_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 44}
GRANITE = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
LONGROPE = ROPE | {
    "rope_type": "longrope",
    "long_factor": [3.0, 2.0, 2.5, 4.0],
    "short_factor": [1.0] * 4,
    "original_max_position_embeddings": 100,
}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

#: By name: transformers' model type and what is set other than in conftest's TINY (grouped heads, untied).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear RoPE": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic RoPE": ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, plain heads": ("llama", {"num_key_value_heads": 6, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 moe": ("qwen3_moe", SMALL_EXPERTS | {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2 moe": ("qwen2_moe", SMALL_EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 52}),
    "gemma": ("gemma", {}),
    "gemma 2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma 3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": LAYERS,
            "rope_parameters": {
                "sliding_attention": ROPE | {"rope_type": "default"},
                "full_attention": ROPE | {"rope_type": "linear", "factor": 8.0},
            },
        },
    ),
    "phi": ("phi", {}),
    "phi-3": ("phi3", {"sliding_window": WINDOW}),
    "phi-3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100}),
    "phi-3.5 moe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo3", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granite": ("granite", GRANITE),
    "granite moe": ("granitemoe", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": LAYERS,
            "rope_parameters": YARN,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere 2": ("cohere2", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "head_dim": 8, "partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "nemotron": ("nemotron", {}),
    "glm-4": ("glm4", {}),
    "glm-4.5": (
        "glm4_moe",
        SMALL_EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "ernie 4.5": ("ernie4_5", {}),
    "ernie 4.5 moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 44, "moe_layer_start_index": 1},
    ),
    "exaone 4": ("exaone4", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "minimax m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "seed-oss": ("seed_oss", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-2": ("gpt2", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512}),
    "opt": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 48}),
}


@dataclass(frozen=True)
class Case:
    model: Model
    folder: Path
    whole: torch.Tensor  # our logits of every row of IDS, in one prefill


#: Of each mechanism one; the others are slow tests.
QUICK = {"llama", "mistral", "qwen2, yarn", "gemma 2", "gemma 3", "gpt-oss", "qwen3 moe", "glm-4.5", "starcoder2"}
FAMILY_PARAMETERS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


#: With native kernels, and as slow tests with torch alone.
KERNELS = ["native", pytest.param("torch", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> KernelsChoice:
    found: KernelsChoice = request.param
    return found


@pytest.fixture(scope="module", params=FAMILY_PARAMETERS)
def case(request: pytest.FixtureRequest, tiny_folder: MakeFolder, kernels: KernelsChoice) -> Case:
    kind, changes = FAMILIES[request.param]
    folder = tiny_folder(kind, **changes)
    model = load(EngineConfig(model=folder, dtype="float32", kernels=kernels))
    return Case(model, folder, computed(model, contiguous(model)))


def computed(model: Model, store: KvStore, *cuts: int, key: str = "a", until: int = LENGTH) -> torch.Tensor:
    """Logits of the rows of IDS up to `until`, computed up to each cut in turn."""
    store.open(key, until, LENGTH)
    return torch.cat([rows(model, store, key, *part) for part in zip((0, *cuts), (*cuts, until), strict=True)])


def rows(model: Model, store: KvStore, key: str, start: int, stop: int) -> torch.Tensor:
    return model.forward(store, [Span(key, start, stop - start)], IDS[start:stop], list(range(stop - start)))


def theirs(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    own = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = own(torch.tensor([IDS]), use_cache=False).logits[0].float()
    return logits


def test_prefill_gives_transformers_own_logits(case: Case) -> None:
    expected = theirs(case.folder, torch.float32)
    torch.testing.assert_close(case.whole, expected, atol=1e-4 * float(expected.std()), rtol=0)


def test_it_is_exact_here(case: Case) -> None:
    assert case.model.exact, case.model.exactness


def test_prefill_in_chunks_gives_the_same_bits_in_either_store(case: Case) -> None:
    model = case.model
    assert torch.equal(case.whole, computed(model, contiguous(model), 50, 70, 71, 72, 130, 149))
    assert torch.equal(case.whole, computed(model, paged(model), 1, 2, 64, 65, 140))


def test_decoding_row_by_row_beside_other_sequences_gives_the_same_bits(case: Case) -> None:
    model, store, first = case.model, contiguous(case.model), 126
    for key, shift in (("a", 0), ("b", 7), ("c", 90)):
        computed(model, store, key=key, until=first - shift)
        store.grow(key, LENGTH)
    for position in range(first, 138):
        spans = [Span("a", position, 1), Span("b", position - 7, 1), Span("c", position - 90, 1)]
        logits = model.forward(store, spans, [IDS[span.start] for span in spans], [0, 1, 2])
        assert torch.equal(logits, case.whole[[span.start for span in spans]])


def test_a_hand_over_goes_on_with_the_same_bits(case: Case) -> None:
    model, source, target, moved = case.model, paged(case.model), contiguous(case.model), 121
    computed(model, source, 60, until=moved)
    target.open("a", LENGTH, LENGTH)
    blocks, _ = source.export("a")
    target.import_blocks("a", source.tensor[blocks], moved)
    after = [rows(model, target, "a", position, position + 1) for position in range(moved, 134)]
    assert torch.equal(torch.cat(after), case.whole[moved:134])


def test_prefilling_again_after_a_preemption_goes_on_with_the_same_bits(case: Case) -> None:
    model, kept = case.model, 130
    for store in (contiguous(model), paged(model)):
        again = computed(model, store, until=kept)
        store.grow("a", LENGTH)
        assert torch.equal(again[-1], case.whole[kept - 1])
        assert torch.equal(rows(model, store, "a", kept, kept + 1), case.whole[kept : kept + 1])


@pytest.mark.parametrize("family", FAMILY_PARAMETERS)
def test_in_bfloat16_bits_do_not_depend_on_the_cuts_either(
    family: str, tiny_folder: MakeFolder, kernels: KernelsChoice
) -> None:
    kind, changes = FAMILIES[family]
    folder = tiny_folder(kind, **changes)
    model = load(EngineConfig(model=folder, dtype="bfloat16", kernels=kernels))
    assert model.exact, model.exactness
    whole = computed(model, contiguous(model))
    assert torch.equal(whole, computed(model, contiguous(model), 63, 64, 100, 101, 149))
    # Not every row is near: a rounding may send one through other experts.
    expected = theirs(folder, torch.bfloat16)
    off = (whole - expected).abs().amax(-1) / expected.std()
    assert float(off.median()) < 0.35


def answers(model: Model, blocks: int) -> tuple[dict[str, list[int]], int]:
    """The ids that four seeded sequences sample, and how often one of them was evicted."""
    store = ContiguousKv(model.geometry, contiguous(model, blocks).pool, 16)
    engine = Engine(model, store, EngineConfig(model=Path("tiny"), num_blocks=blocks, prefill_chunk=50))
    sampling = [Sampling(max_tokens=40, temperature=1.0, seed=n, ignore_eos=True) for n in range(4)]
    waiting = [Sequence(f"{n}@1", tuple(IDS[9 * n : 40 + 9 * n]), sampling[n], arrival_ms=n) for n in range(4)]
    every, evictions = {sequence.key: sequence for sequence in waiting}, 0
    while waiting or engine.has_work:
        with suppress(NoRoom):
            while waiting:
                sequence = waiting[0]
                engine.add(sequence)
                every[sequence.key] = sequence
                del waiting[0]
        step = engine.step()
        evictions += len(step.evicted)
        waiting += [replace(every[key]) for key in step.evicted]
    return {key: sequence.ids for key, sequence in every.items()}, evictions


@pytest.mark.parametrize("family", ["gemma 2", "gpt-oss", "qwen3 moe", "mistral"])
def test_sequences_evicted_from_a_small_pool_come_back_to_the_same_ids(family: str, tiny_folder: MakeFolder) -> None:
    kind, changes = FAMILIES[family]
    model = load(EngineConfig(model=tiny_folder(kind, **changes), dtype="float32"))
    expected, none = answers(model, blocks=40)
    squeezed, evictions = answers(model, blocks=11)
    assert none == 0
    assert evictions > 0
    assert squeezed == expected


def test_dynamic_rope_reaches_beyond_the_model_s_own_context_pinned_at_what_is_served(tiny_folder: MakeFolder) -> None:
    rope = ROPE | {"rope_type": "dynamic", "factor": 4.0}
    folder = tiny_folder("llama", rope_parameters=rope, max_position_embeddings=64)
    model = load(EngineConfig(model=folder, dtype="float32", max_model_len=LENGTH))
    expected = theirs(folder, torch.float32)  # of a text as long as the context: what is pinned is what they use
    ours = computed(model, contiguous(model), 30, 100)
    torch.testing.assert_close(ours, expected, atol=1e-4 * float(expected.std()), rtol=0)
