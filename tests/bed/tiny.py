"""A tiny random model with a tokenizer: real forwards at the pace of the null model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.engine.conftest import tiny_network
from tests.unit.text.families import BACKENDS


def make_tiny_model(folder: Path) -> Path:
    """Write three layers of a Llama, and a byte-level tokenizer, so that most characters take several tokens."""
    backend = BACKENDS["byte_level"]()
    tiny_network("llama", vocab_size=backend.get_vocab_size()).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder
