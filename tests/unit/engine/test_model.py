"""Real architectures, tiny and random: the same logits as transformers' own, the same bits however a text is cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prelay_engine.attention import Span
from prelay_engine.config import EngineConfig
from prelay_engine.errors import ConfigError, ModelError
from prelay_engine.kv import KvStore
from prelay_engine.loading import load
from prelay_engine.model import Model
from prelay_engine.native.lib import Kernels, Packed

from .conftest import LoadModel, MakeFolder, contiguous, paged

LENGTH = 150
IDS = torch.randint(3, 300, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()

SERVED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 90},
    "qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 70, "query_pre_attn_scalar": 16},
    "phi3": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "olmo2": {},
    "cohere2": {"sliding_window": 64},
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512},
}


def in_chunks(model: Model, store: KvStore, *cuts: int) -> torch.Tensor:
    """Logits of every row of IDS, computed up to each cut in turn."""
    store.open("a", LENGTH, LENGTH)
    outs, begin = [], 0
    for cut in (*cuts, LENGTH):
        outs.append(model.forward(store, [Span("a", begin, cut - begin)], IDS[begin:cut], list(range(cut - begin))))
        begin = cut
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SERVED)
def test_logits_are_transformers_own_and_their_bits_do_not_depend_on_the_cuts(
    kind: str, dtype: str, tiny_folder: MakeFolder
) -> None:
    folder = tiny_folder(kind, **SERVED[kind])
    model = load(EngineConfig(model=folder, dtype=dtype))  # type: ignore[arg-type]
    assert model.exact, model.exactness
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.geometry.dtype)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].float()

    whole = in_chunks(model, contiguous(model))
    spread = float(expected.std())
    tolerance = 1e-4 * spread if dtype == "float32" else 0.2 * spread
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=0)
    assert torch.equal(whole, in_chunks(model, contiguous(model), 50, 70, 71, 72, 130, 149))
    assert torch.equal(whole, in_chunks(model, paged(model), 1, 2, 64, 65, 140))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others_in_either_store(dtype: str, tiny_model: LoadModel) -> None:
    model = tiny_model(dtype)
    lengths = {"a": 149, "b": 3, "c": 64, "d": 77}
    for make in (contiguous, paged):
        store, alone = make(model), make(model)
        for key, length in lengths.items():
            for each in (store, alone):
                each.open(key, length + 1, length + 1)
                model.forward(each, [Span(key, 0, length)], IDS[:length], [])
        spans = [Span(key, length, 1) for key, length in lengths.items()]
        # Beside the decoding rows a chunk of another prompt, as a unified worker runs them.
        store.open("new", 70, 70)
        tokens = [IDS[length] for length in lengths.values()]
        together = model.forward(store, [*spans, Span("new", 0, 70)], [*tokens, *IDS[:70]], [0, 1, 2, 3])
        for row, span in enumerate(spans):
            single = model.forward(alone, [span], [IDS[span.start]], [0])
            assert torch.equal(single[0], together[row])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "hybrid or recurrent model"),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        "hybrid or recurrent",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "hybrid or recurrent model"),
    "bloom": ({}, "do not use attention that can be paged"),
    "mpt": ({"d_model": 48, "n_heads": 6, "n_layers": 1}, "attention of its own that cannot be replaced"),
    "llama4_text": (
        {"attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 64},
        "neither causal nor a sliding window",
    ),
    "deepseek_v3": (
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
        },
        "latent attention",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_we_would_compute_wrongly_is_refused_with_the_reason(kind: str, tiny_folder: MakeFolder) -> None:
    changes, reason = REFUSED[kind]
    with pytest.raises(ModelError, match=reason):
        load(EngineConfig(model=tiny_folder(kind, **changes)))


def test_a_model_with_a_tower_is_refused_by_its_configuration(tiny_folder: MakeFolder, tmp_path: Path) -> None:
    towers = {"model_type": "gemma3", "vision_config": {}, "text_config": {}}
    assert "gemma3 has a vision tower" in refusal(rewritten(tiny_folder("llama"), tmp_path / "g", **towers))
    assert "audio tower" in refusal(rewritten(tiny_folder("llama"), tmp_path / "q", model_type="qwen2_audio"))


# Broken and missing folders


def rewritten(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(EngineConfig(model=path, dtype="float32"))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_such_path_and_no_such_kind_of_file_are_told_apart(tmp_path: Path) -> None:
    assert "there is no model at" in refusal(tmp_path / "absent")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a model folder nor a .gguf file" in refusal(tmp_path / "notes.txt")


def test_a_folder_without_weights_or_with_broken_files_is_refused(tiny_folder: MakeFolder, tmp_path: Path) -> None:
    good = tiny_folder("llama")
    empty = rewritten(good, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert "cannot load" in refusal(empty)

    cut = rewritten(good, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot load" in refusal(cut)

    garbled = rewritten(good, tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    assert "cannot load" in refusal(garbled)

    unknown = rewritten(good, tmp_path / "unknown", model_type="perceptron9000")
    assert "perceptron9000" in refusal(unknown)


def test_a_checkpoint_that_lacks_a_weight_is_not_filled_with_random_numbers(
    tiny_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = rewritten(tiny_folder("llama"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights, first model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model")
    assert "cannot load" in refusal(tmp_path / "m.gguf")


def test_code_that_comes_with_a_model_is_never_run(tiny_folder: MakeFolder, tmp_path: Path) -> None:
    folder = rewritten(
        tiny_folder("llama"),
        tmp_path / "m",
        model_type="own",
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    )
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_quantised_and_encoder_decoder_checkpoints_are_refused_by_their_configuration(
    tiny_folder: MakeFolder, tmp_path: Path
) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "quantised" in refusal(rewritten(tiny_folder("llama"), tmp_path / "q", **quantised))
    assert "encoder-decoder" in refusal(rewritten(tiny_folder("llama"), tmp_path / "t5", model_type="t5"))


# What the rest must know


def test_the_context_can_be_shortened_but_not_stretched(tiny_folder: MakeFolder) -> None:
    folder = tiny_folder("llama")
    assert load(EngineConfig(model=folder, max_model_len=100, dtype="float32")).context_len == 100
    with pytest.raises(ConfigError, match="max_model_len must be at most the model's 512, not 513"):
        load(EngineConfig(model=folder, max_model_len=513))


def test_all_ids_that_end_a_text_are_known(tiny_folder: MakeFolder, tmp_path: Path) -> None:
    folder = rewritten(tiny_folder("llama"), tmp_path / "m", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(EngineConfig(model=folder, dtype="float32")).eos_ids == {2, 7, 9}


def test_the_layout_hash_follows_what_blocks_mean(tiny_folder: MakeFolder, tiny_model: LoadModel) -> None:
    model = tiny_model("float32")
    again = load(EngineConfig(model=tiny_folder("llama"), dtype="float32"))
    hotter = load(EngineConfig(model=tiny_folder("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})))
    assert model.layout_hash(16) == again.layout_hash(16)
    different = {model.layout_hash(16), model.layout_hash(32), tiny_model("bfloat16").layout_hash(16)}
    assert len(different | {hotter.layout_hash(16)}) == 4


def test_the_numerics_hash_follows_kernels_dtype_threads_and_exactness(tiny_model: LoadModel) -> None:
    model = tiny_model("float32", "torch")
    before = model.numerics_hash()
    assert before == model.numerics_hash() != tiny_model("bfloat16", "torch").numerics_hash()
    assert before != tiny_model("float32").numerics_hash()
    model.threads = 2
    with_threads = model.numerics_hash()
    model.threads, model.exact = 1, False
    inexact = model.numerics_hash()
    model.exact = True
    assert len({before, with_threads, inexact}) == 3


def test_the_bits_of_fused_layers_follow_no_number_of_threads(tiny_folder: MakeFolder) -> None:
    one, three = (load(EngineConfig(model=tiny_folder("llama"), threads=n, kernels="native")) for n in (1, 3))
    assert one.how == "native kernels, fused layers"
    assert one.numerics_hash() == three.numerics_hash()
    spans = [Span("a", 0, len(IDS))]
    found = []
    for model in (one, three):
        store = contiguous(model)
        store.open("a", len(IDS), len(IDS))
        found.append(model.forward(store, spans, IDS, list(range(len(IDS)))))
    assert torch.equal(*found)


def test_eight_bits_are_exact_and_have_numerics_of_their_own(tiny_folder: MakeFolder) -> None:
    plain, eight = (load(EngineConfig(model=tiny_folder("llama"), quantization=kind)) for kind in ("none", "w8a8"))
    assert eight.how == "native kernels, fused layers, w8a8"
    assert eight.exact
    assert plain.numerics_hash() != eight.numerics_hash()
    assert plain.layout_hash(16) == eight.layout_hash(16)


def test_eight_bits_without_native_kernels_are_refused(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^quantization must be none with kernels=torch, not 'w8a8'$"):
        EngineConfig(model=tiny_folder("llama"), kernels="torch", quantization="w8a8")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"^quantization=w8a8: there is no C\+\+ compiler"):
        load(EngineConfig(model=tiny_folder("llama"), quantization="w8a8"))


def test_a_router_s_weights_are_not_rounded_to_eight_bits(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[bool, int]] = []
    pack = Kernels.pack

    def spy(self: Kernels, weight: torch.Tensor, whole: bool = False) -> Packed:
        kept.append((whole, weight.shape[0]))
        return pack(self, weight, whole)

    monkeypatch.setattr(Kernels, "pack", spy)
    model = load(EngineConfig(model=tiny_folder("mixtral"), quantization="w8a8"))
    assert model.how == "native kernels, w8a8"
    assert model.exact
    experts = model.net.config.num_local_experts
    assert {count for whole, count in kept if whole} == {experts}


# RoPE that follows the longest position of a batch


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [3.0] * 4,
    "short_factor": [1.0] * 4,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 100,
}


def test_longrope_is_pinned_so_that_a_row_does_not_depend_on_how_far_its_batch_reaches(
    tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=100)

    def cuts_matter() -> bool:
        model = load(EngineConfig(model=folder, dtype="float32"))
        # In one go the batch reaches position 149, in chunks it is below 100 at first.
        return not torch.equal(in_chunks(model, contiguous(model)), in_chunks(model, contiguous(model), 40, 90))

    assert not cuts_matter()
    monkeypatch.setattr("prelay_engine.loading._pin_rope", lambda *_: None)
    assert cuts_matter(), "this test no longer tests anything"


def test_dynamic_rope_is_pinned_too(tiny_folder: MakeFolder) -> None:
    model = load(EngineConfig(model=tiny_folder("llama", rope_parameters=DYNAMIC), dtype="float32"))
    assert model.net.model.rotary_emb.rope_type == "default"


def test_pinned_longrope_uses_the_factors_of_the_context_that_is_served(tiny_folder: MakeFolder) -> None:
    folder = tiny_folder("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=100)
    long = load(EngineConfig(model=folder, dtype="float32"))
    short = load(EngineConfig(model=folder, dtype="float32", max_model_len=100))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
        expected_short = theirs(torch.tensor([IDS[:90]])).logits[0]
    torch.testing.assert_close(in_chunks(long, contiguous(long)), expected, atol=1e-3, rtol=0)
    store = contiguous(short)
    store.open("a", 90, 90)
    ours = short.forward(store, [Span("a", 0, 90)], IDS[:90], list(range(90)))
    torch.testing.assert_close(ours, expected_short, atol=1e-3, rtol=0)
    assert long.layout_hash(16) != short.layout_hash(16)
