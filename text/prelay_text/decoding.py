"""How the tokens of one tokenizer become text, read from the `decoder` part of its tokenizer.json.

The library's own `decode` looks at a whole text at once. To decode token by token and still end at
the very same text, the decoder must be one whose work on a token is known: this file translates the
ones that language models use and refuses the others by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .errors import ModelFilesError

#: What one token gives: raw bytes (byte-level), text, or one byte of a byte-fallback run.
Piece = bytes | str | int

#: Maps the text of a token, given whether it is the first of its text.
Stage = Callable[[str, bool], str]

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_of_char() -> Mapping[str, int]:
    """The byte-level alphabet: GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = {chr(byte): byte for byte in printable}
    chars.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return chars


@dataclass(frozen=True)
class Decoding:
    """The decoder of one tokenizer.

    `before` maps each token's text, `after` each text that leaves the byte-fallback step. At most
    `strip_count` characters `strip` are taken off the start of the whole text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()
    strip: str = " "
    strip_count: int = 0

    def piece(self, token: str, first: bool) -> Piece:
        """What the token string gives. `first`: no text token stands before it."""
        if self.byte_level:
            return _byte_level(token)
        text = _through(self.before, token, first)
        if self.byte_fallback and (match := _FALLBACK_BYTE.fullmatch(text)):
            return int(match[1], 16)
        return text

    def settle(self, text: str, first: bool) -> str:
        """The last steps on a text that left the byte-fallback step."""
        return _through(self.after, text, first) if self.after else text


def _through(stages: Sequence[Stage], text: str, first: bool) -> str:
    for stage in stages:
        text = stage(text, first)
    return text


def _byte_level(token: str) -> bytes:
    # Added tokens hold characters outside the alphabet: the library takes such a token as plain text.
    table = byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:
        return token.encode()


def parse_decoder(decoder: Mapping[str, Any] | None) -> Decoding:
    """Read the `decoder` of a tokenizer.json; raise ModelFilesError for one that cannot be followed."""
    if decoder is None:
        return Decoding(before=(_join_with_spaces,))
    parts = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    reader = _Reader()
    for part in parts:
        reader.read(part)
    return reader.decoding()


class _Reader:
    """Collects the steps of a decoder in their order."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._before: list[Stage] = []
        self._after: list[Stage] = []
        self._strip, self._strip_count = " ", 0

    def read(self, part: Mapping[str, Any]) -> None:
        kind = str(part.get("type"))
        steps = {
            "ByteLevel": self._alone,
            "ByteFallback": self._alone,
            "Fuse": lambda _: None,
            "Replace": self._replace,
            "Metaspace": self._metaspace,
            "Strip": self._strip_start,
        }
        if kind not in steps or "Strip" in self._seen:
            raise self._refused(kind)
        steps[kind](part)
        self._seen.append(kind)

    def decoding(self) -> Decoding:
        return Decoding(
            byte_level="ByteLevel" in self._seen,
            byte_fallback="ByteFallback" in self._seen,
            before=tuple(self._before),
            after=tuple(self._after),
            strip=self._strip,
            strip_count=self._strip_count,
        )

    def _alone(self, part: Mapping[str, Any]) -> None:
        # The two do not mix, byte-level fuses all tokens, and a fused text has no byte tokens left.
        after = set(self._seen)
        if {"ByteLevel", "ByteFallback", "Fuse"} & after or (part["type"] == "ByteLevel" and after):
            raise self._refused(part["type"])

    def _replace(self, part: Mapping[str, Any]) -> None:
        pattern = part.get("pattern", {}).get("String")
        if pattern is None:
            raise self._refused("Replace with a regular expression")
        content = str(part.get("content", ""))
        self._add("Replace", lambda text, _: text.replace(pattern, content))

    def _metaspace(self, part: Mapping[str, Any]) -> None:
        mark = str(part.get("replacement", "▁"))
        keeps_first = part.get("prepend_scheme", "always") == "never"
        self._add("Metaspace", lambda text, first: text.replace(mark, "" if first and not keeps_first else " "))

    def _add(self, kind: str, stage: Stage) -> None:
        if {"ByteLevel", "Fuse"} & set(self._seen):
            raise self._refused(f"{kind} on fused text")  # it could span two tokens
        (self._after if "ByteFallback" in self._seen else self._before).append(stage)

    def _strip_start(self, part: Mapping[str, Any]) -> None:
        fused = {"ByteLevel", "Fuse"} & set(self._seen)
        if not fused or part.get("stop", 0):
            raise self._refused("Strip of single tokens or of the end")
        self._strip, self._strip_count = str(part.get("content", " ")), int(part.get("start", 0))

    def _refused(self, kind: str) -> ModelFilesError:
        order = " > ".join([*self._seen, kind])
        return ModelFilesError(f"tokenizer.json: the decoder {order} cannot be followed token by token")


def _join_with_spaces(text: str, first: bool) -> str:
    return text if first else " " + text
