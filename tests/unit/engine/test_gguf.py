"""A .gguf file is one more way to store the same model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from prelay_engine.config import EngineConfig
from prelay_engine.loading import load

from .conftest import TINY, MakeFolder, contiguous
from .test_model import in_chunks

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return whole.get(name, "output.weight")
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows that GGUF keeps queries and keys in: the halves that RoPE pairs, side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def tiny_gguf(tiny_folder: MakeFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(100)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(320)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = sorted(set(range(33, 127)) | set(range(161, 173)) | set(range(174, 323)))
    tokens = ["<|end|>", "<|start|>", "<|stop|>", *(chr(code) for code in alphabet)]
    tokens += [f"filler{i}" for i in range(TINY["vocab_size"] - len(tokens) - 2)]
    tokens += ["12", "Ġ1"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * (len(tokens) - 3))])
    writer.add_token_merges(["1 2", "Ġ 1"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    for name, weight in load_file(tiny_folder("llama") / "model.safetensors").items():
        heads = {"q_proj": 6, "k_proj": 2}.get(name.split(".")[-2], 0)
        writer.add_tensor(gguf_name(name), (interleaved(weight, heads) if heads else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(tiny_gguf: Path, tiny_folder: MakeFolder) -> None:
    ours = load(EngineConfig(model=tiny_gguf, dtype="float32"))
    folder = load(EngineConfig(model=tiny_folder("llama"), dtype="float32"))
    assert ours.exact
    assert (ours.context_len, ours.vocab_size, ours.eos_ids) == (512, 320, frozenset({2}))
    torch.testing.assert_close(in_chunks(ours, contiguous(ours)), in_chunks(folder, contiguous(folder)))


@pytest.mark.slow
def test_a_converted_gguf_is_a_folder_with_a_tokenizer_that_splits_digits_as_the_file_says(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    # In a process of its own, as it is run: it changes what `gguf` does there.
    command = [sys.executable, "-m", "prelay_engine.convert", str(tiny_gguf), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("x12 1") == ["x", "1", "2", "Ġ", "1"]

    converted = load(EngineConfig(model=tmp_path, dtype="bfloat16"))
    direct = load(EngineConfig(model=tiny_gguf, dtype="bfloat16"))
    assert torch.equal(in_chunks(converted, contiguous(converted)), in_chunks(direct, contiguous(direct)))
