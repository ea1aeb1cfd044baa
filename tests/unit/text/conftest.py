"""A tokenizer of every family, and model folders to read one from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from prelay_text.tokenizer import Tokenizer
from tests.unit.text.families import BACKENDS, build


@pytest.fixture(scope="session", params=sorted(BACKENDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One tokenizer of every family, one after the other."""
    return build(request.param)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return build("byte_level")


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    return build("llama")


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder; keyword arguments replace the parts of it, None leaves a file out."""

    def write(name: str = "byte_level", *, bos: bool = False, **files: dict[str, Any] | None) -> Path:
        backend = BACKENDS[name]()
        if bos:
            start = ("<s>", backend.token_to_id("<s>"))
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
        backend.save(str(tmp_path / "tokenizer.json"))
        defaults: dict[str, dict[str, Any] | None] = {
            "config": {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 64},
            "generation_config": {"eos_token_id": backend.token_to_id("</s>")},
            "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"},
        }
        for file, content in {**defaults, **files}.items():
            if content is not None:
                (tmp_path / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write
