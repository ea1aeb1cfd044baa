"""A model folder without a model: each id is one word, "t17", so that a text shows the ids it was made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

#: Ids 0 … WORDS-1 are the words t0 … ; the null model's vocabulary.
WORDS = 1000
EOS_ID = WORDS
CONTEXT = 4096

_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
_WORD = re.compile(r"t(\d+)")


def make_tokenizer(folder: Path, context_len: int = CONTEXT) -> Path:
    """Write the folder and return it; it does for `ApiConfig.model` and for a null worker's `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {f"t{i}": i for i in range(WORDS)} | {"<eos>": EOS_ID}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": context_len, "vocab_size": WORDS + 1, "eos_token_id": EOS_ID}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<eos>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def words(ids: Iterable[int]) -> str:
    """The text that encodes to `ids`."""
    return " ".join(f"t{i}" for i in ids)


def ids_of(text: str) -> list[int]:
    """The ids that a text shows. A last word may be incomplete: give whole frames only."""
    return [int(number) for number in _WORD.findall(text)]


def chat(*turns: Sequence[int]) -> list[dict[str, str]]:
    """Messages whose prompt ids are the turns' ids in a row."""
    return [{"role": "user", "content": words(ids)} for ids in turns]
