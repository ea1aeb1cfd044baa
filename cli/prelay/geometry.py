"""How large a model's KV is, read from its config.json without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelUnavailable


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one token costs: keys and values of all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    context_len: int

    def token_bytes(self, element_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_geometry(folder: Path) -> Geometry:
    """Read config.json. Raise ModelUnavailable with one line."""
    values = _config(folder)
    heads = _number(values, folder, "num_attention_heads")
    return Geometry(
        layers=_number(values, folder, "num_hidden_layers"),
        kv_heads=_optional(values, folder, "num_key_value_heads") or heads,
        head_dim=_optional(values, folder, "head_dim") or _number(values, folder, "hidden_size") // heads,
        context_len=context_len(folder),
    )


def context_len(folder: Path) -> int:
    """Return the model's context in tokens. Raise ModelUnavailable."""
    return _number(_config(folder), folder, "max_position_embeddings")


def check_folder(folder: Path, with_weights: bool) -> None:
    """Raise ModelUnavailable unless the files that every part needs are there."""
    _config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(f"the model folder {folder} has no tokenizer.json")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"the model folder {folder} has no *.safetensors weights")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnavailable(f"the model folder {folder} has no config.json") from None
    except OSError as error:
        raise ModelUnavailable(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelUnavailable(f"{path} holds no JSON object")
    nested = values.get("text_config")
    return values | nested if isinstance(nested, dict) else values


def _number(values: dict[str, Any], folder: Path, name: str) -> int:
    """Return a positive whole number. Raise ModelUnavailable, which says what stands there in JSON's own words."""
    if name not in values:
        raise ModelUnavailable(f"{folder / 'config.json'} has no {name}: a positive whole number is needed")
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnavailable(
            f"{folder / 'config.json'}: {name} must be a positive whole number, not {json.dumps(value):.40}"
        )
    return value


def _optional(values: dict[str, Any], folder: Path, name: str) -> int | None:
    """The same where the key may be absent or null, which is how models say "as usual"."""
    return None if values.get(name) is None else _number(values, folder, name)
