"""Small tokenizers of every family that language models use, built here so that no test needs a download."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from prelay_text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps.\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n\n",
    "いろはにほへと ちりぬるを 日本語 日本 語\n",
    "😀 emoji 😀😀 and 👩‍👩‍👧 families; naïve café, Ωmega.  two  spaces\n",
] * 3

SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # An added token outside the byte-level alphabet, and one whose spelling is inside it.
    backend.add_tokens([AddedToken("日本 z"), AddedToken("Ġq")])
    return backend


def _byte_fallback(decoder: Any) -> tokenizers.Tokenizer:
    """A sentencepiece-like BPE: characters the training did not see fall back to bytes."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIALS, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS[:2], trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁▁", "▁the", "日"):
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(SPECIALS)
    return backend


def _unigram() -> tokenizers.Tokenizer:
    pieces = ["▁", "▁the", "▁dog", "e", "s", "th", "og", "▁▁", "日", "a▁b"]
    vocab = [(token, 0.0) for token in SPECIALS]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocab += [(piece, -float(index + 1)) for index, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(SPECIALS)
    return backend


def llama_decoder() -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def gemma_decoder() -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": _byte_level,
    "llama": lambda: _byte_fallback(llama_decoder()),
    "gemma": lambda: _byte_fallback(gemma_decoder()),
    "metaspace": lambda: _byte_fallback(decoders.Metaspace()),
    "unigram": _unigram,
    "no_decoder": lambda: _byte_fallback(None),
}


def build(name: str) -> Tokenizer:
    backend = BACKENDS[name]()
    return Tokenizer(backend, context_len=64, eos_ids=[SPECIALS.index("</s>")])
