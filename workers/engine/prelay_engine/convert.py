"""Turn a GGUF file into a Hugging Face folder that any part of Prelay can read.

Run as a process of its own (`python -m prelay_engine.convert FILE FOLDER`), so that the caller needs
neither torch nor the memory of the unpacked weights.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import gguf

from .gemma import mend_scale

#: Pre-tokenizers of the GGUF format that transformers' converter does not know, by `tokenizer.ggml.pre`.
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


def convert_gguf(source: Path, folder: Path) -> None:
    """Write `folder` (which exists and is empty): bf16 safetensors, tokenizer and configurations."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    _parse_once()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    mend_scale(loaded)
    model = _plain(loaded)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _split_as_trained(tokenizer, source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _tidy(folder)


def _parse_once() -> None:
    """Let this process read a file's metadata once: transformers asks three times, at seconds each."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


def _plain(loaded: Any) -> Any:
    """The same model without the trace of a quantiser, which refuses to be saved."""
    import torch

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _split_as_trained(tokenizer: Any, source: Path) -> None:
    """Split digits one by one where the file says so: the merges were learned that way."""
    from tokenizers import pre_tokenizers

    field = gguf.GGUFReader(str(source)).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _tidy(folder: Path) -> None:
    """Drop what is true only of the conversion, and write float32 constants as they were meant."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        values = json.loads(path.read_text())
        for passing in ("_model_name_or_path", "is_local", "local_files_only"):
            values.pop(passing, None)
        if "rms_norm_eps" in values:
            values["rms_norm_eps"] = float(f"{values['rms_norm_eps']:.6g}")
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)  # a cache is often shared by containers that run as other users


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
