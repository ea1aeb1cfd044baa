"""Files of the architectures that transformers reads from GGUF give the logits of the folder they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from prelay_engine.config import EngineConfig
from prelay_engine.gemma import mend_scale
from prelay_engine.loading import load

from .conftest import MakeFolder, contiguous, tiny_network
from .test_model import in_chunks

#: GGUF's name → transformers' model type and changes to TINY. What transformers does not read from a file (a head's
#: size in Qwen 3, the scale of Gemma's queries) is what it takes instead.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma2": ("gemma2", {"sliding_window": 40, "query_pre_attn_scalar": 256}),
    "gemma3": ("gemma3_text", {"sliding_window": 40, "query_pre_attn_scalar": 256}),
    "phi3": ("phi3", {}),
}


def write(path: Path, kind: str, weights: dict[str, torch.Tensor], norm_epsilon: float) -> None:
    """What llama.cpp's converter writes: its names for the weights, and Gemma's norms with the 1 in the weight."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, 3)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(100)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(KINDS[kind][1].get("head_dim", 8))
    writer.add_value_length(KINDS[kind][1].get("head_dim", 8))
    writer.add_rope_dimension_count(KINDS[kind][1].get("head_dim", 8))
    writer.add_rope_freq_base(1000000.0 if kind == "gemma3" else 10000.0)  # of its layers without a window
    writer.add_layer_norm_rms_eps(norm_epsilon)
    writer.add_layer_norm_eps(norm_epsilon)
    writer.add_vocab_size(320)
    if "sliding_window" in KINDS[kind][1]:
        writer.add_sliding_window(KINDS[kind][1]["sliding_window"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, weight in weights.items():
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        stem, _, ending = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_of_this_architecture_gives_the_logits_of_its_folder(
    kind: str, tiny_folder: MakeFolder, tmp_path: Path
) -> None:
    model_type, changes = KINDS[kind]
    source = tiny_folder(model_type, **changes)
    folder = load(EngineConfig(model=source, dtype="float32"))
    text = folder.net.config
    epsilon = getattr(text, "rms_norm_eps", getattr(text, "norm_epsilon", 1e-6))
    write(tmp_path / "m.gguf", kind, load_file(source / "model.safetensors"), epsilon)

    ours = load(EngineConfig(model=tmp_path / "m.gguf", dtype="float32"))
    assert ours.exact, ours.exactness
    assert (ours.context_len, ours.vocab_size) == (512, 320)
    expected = in_chunks(folder, contiguous(folder))
    torch.testing.assert_close(in_chunks(ours, contiguous(ours)), expected, atol=1e-4 * float(expected.std()), rtol=0)


@pytest.mark.parametrize(("model_type", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemmas_scale_their_queries_by_what_the_file_does_not_say(model_type: str, layers: int) -> None:
    small, large = (tiny_network(model_type, num_hidden_layers=count) for count in (layers - 1, layers))
    assert not mend_scale(small)
    assert small.model.layers[0].self_attn.scaling == 256**-0.5
    assert mend_scale(large)
    assert large.config.query_pre_attn_scalar == 48 // 6
    assert {layer.self_attn.scaling for layer in large.model.layers} == {8**-0.5}
