"""A Llama of a wanted size with random weights, written as a folder: for what loading costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

_VOCABULARY, _HEAD = 32_000, 64
#: Bytes of a bfloat16 weight, in which checkpoints come.
_WEIGHT = 2
#: Bytes of one file; as large checkpoints are cut, in proportion.
_SHARD = 256_000_000

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """What makes up a Llama with tied embeddings and four query heads to a key head."""

    hidden: int
    layers: int
    intermediate: int

    @property
    def heads(self) -> int:
        return self.hidden // _HEAD

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """All tensors by name, in the order in which they are written."""
        hidden, kv = self.hidden, self.kv_heads * _HEAD
        yield "model.embed_tokens.weight", (_VOCABULARY, hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield f"{at}input_layernorm.weight", (hidden,)
            yield f"{at}self_attn.q_proj.weight", (hidden, hidden)
            yield f"{at}self_attn.k_proj.weight", (kv, hidden)
            yield f"{at}self_attn.v_proj.weight", (kv, hidden)
            yield f"{at}self_attn.o_proj.weight", (hidden, hidden)
            yield f"{at}post_attention_layernorm.weight", (hidden,)
            yield f"{at}mlp.gate_proj.weight", (self.intermediate, hidden)
            yield f"{at}mlp.up_proj.weight", (self.intermediate, hidden)
            yield f"{at}mlp.down_proj.weight", (hidden, self.intermediate)
        yield "model.norm.weight", (hidden,)

    def nbytes(self) -> int:
        return sum(_WEIGHT * torch.Size(shape).numel() for _, shape in self.weights())


def size_of(nbytes: int) -> Size:
    """Dimensions as models of about that size have them; within a few percent of `nbytes` from 50 MB on."""
    hidden = next((width for limit, width in ((3e8, 512), (1e9, 1024), (8e9, 2048)) if nbytes < limit), 4096)
    rest = max(0, nbytes // _WEIGHT - _VOCABULARY * hidden)
    attention = 2.5 * hidden**2
    layers = max(1, round(rest / (attention + 8 * hidden**2)))
    intermediate = max(1, round((rest / layers - attention) / (3 * hidden) / 64)) * 64
    return Size(hidden, layers, intermediate)


def write(folder: Path, nbytes: int) -> Size:
    """Write config.json and the weights, in shards with an index. The same size gives the same weights."""
    size, generator = size_of(nbytes), torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(size)))
    shards: list[dict[str, Shape]] = [{}]
    held = 0
    for name, shape in size.weights():
        if held > _SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += _WEIGHT * torch.Size(shape).numel()
    files = {f"model-{n:05}-of-{len(shards):05}.safetensors": shard for n, shard in enumerate(shards, 1)}
    for file, shard in files.items():
        tensors = {name: _weight(shape, generator) for name, shape in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, shard in files.items() for name in shard}
    index = {"metadata": {"total_size": size.nbytes()}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def _weight(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def _config(size: Size) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": _HEAD,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
