"""A set of line numbers, a bit each."""

from __future__ import annotations


class Bitmap:
    """Numbers from 0 on. A million take 125 kB."""

    def __init__(self, raw: bytes = b"") -> None:
        self._bits = bytearray(raw)
        self._count = int.from_bytes(raw, "little").bit_count()

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Bitmap({self._count} of {len(self._bits) * 8})"

    def add(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"number must be at least 0, not {number}")
        if number in self:
            return
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (number & 7)
        self._count += 1

    def encode(self) -> bytes:
        return bytes(self._bits)
