"""The name under which a fleet's keys and jobs live: one model, one fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .errors import ModelFilesError

#: Files that hold weights, by suffix. Their names and sizes count; reading gigabytes would not pay.
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def fingerprint(folder: Path) -> str:
    """16 hex digits of config.json, tokenizer.json and the weight files' names and sizes.

    Every process and host that serves the same folder computes the same value; paths and times do not
    count. Two models that differ only in the weights' values, at equal names and sizes, look alike.
    """
    digest = hashlib.sha256()  # has instructions of its own on most CPUs: a third of blake2b's time
    for name in ("config.json", "tokenizer.json"):
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ModelFilesError(f"{folder / name}: cannot be read: {error.strerror}") from None
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        if file.suffix in _WEIGHTS and file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
