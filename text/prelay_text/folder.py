"""The small files of a model folder, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .errors import ModelFilesError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFolder:
    """What config.json, generation_config.json, tokenizer_config.json and the template file say."""

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    chat_template: str | None

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Raise ModelFilesError when the folder, its config.json or its tokenizer.json is missing or broken."""
        if not path.is_dir():
            raise ModelFilesError(f"{path}: no such model folder")
        if not (path / "tokenizer.json").is_file():
            raise ModelFilesError(f"{path}: has no tokenizer.json")
        tokenizer = _read_json(path / "tokenizer_config.json") or {}
        if "added_tokens_decoder" not in tokenizer:  # folders of the older kind name their tokens apart
            tokenizer = {**tokenizer, **(_read_json(path / "special_tokens_map.json") or {})}
        config = _read_json(path / "config.json")
        if config is None:
            raise ModelFilesError(f"{path}: has no config.json")
        generation = _read_json(path / "generation_config.json") or {}
        return cls(path, config, generation, tokenizer, _template(path, tokenizer))

    def number(self, *names: str) -> int | None:
        """The first of these fields that config.json has, looked for in its `text_config` too."""
        text = self.config.get("text_config")
        for place in (self.config, text if isinstance(text, dict) else {}):
            for name in names:
                if isinstance(value := place.get(name), int) and value > 0:
                    return value
        return None

    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like: their names and contents, as a chat template sees them."""
        named = {name: _content(self.tokenizer.get(name)) for name in _NAMED_TOKENS}
        return {name: content for name, content in named.items() if content is not None}

    def special_tokens(self) -> list[str]:
        """Contents of all tokens that the tokenizer's configuration calls special."""
        extra: list[Any] = []
        for name in ("additional_special_tokens", "extra_special_tokens"):
            value = self.tokenizer.get(name) or ()
            extra.extend(value.values() if isinstance(value, dict) else value)
        added = self.tokenizer.get("added_tokens_decoder") or {}
        extra.extend(token for token in added.values() if isinstance(token, dict) and token.get("special"))
        contents = [*self.named_tokens().values(), *map(_content, extra)]
        return [content for content in dict.fromkeys(contents) if content is not None]

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of generation_config.json, or of config.json where that names none."""
        text = self.config.get("text_config")
        for place in (self.generation, self.config, text if isinstance(text, dict) else {}):
            value = place.get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        return ()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelFilesError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelFilesError(f"{path}: is not a JSON object")
    return data


def _template(path: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """chat_template.jinja before the entry in tokenizer_config.json; of several, the one named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = tokenizer.get("chat_template")
    if isinstance(entry, list):
        entry = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
    if isinstance(entry, dict):
        entry = entry.get("default")
    return entry if isinstance(entry, str) else None


def _content(token: Any) -> str | None:
    """A token stands in the configuration as its text or as an object that holds it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
