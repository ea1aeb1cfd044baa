"""The input file, line by line, and the custom_ids that were seen in it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from prelay_text.batch_line import is_blank

#: Bytes of a line; an upload's own limit is lower.
MAX_LINE_BYTES = 8 * 2**20


def lines_of(file: BinaryIO, most_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file that are not blank, with their numbers from 0. None for one that is too long to be held."""
    number = 0
    while raw := file.readline(most_bytes + 1):
        if len(raw) <= most_bytes:
            if not is_blank(raw):
                yield number, raw
        else:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(most_bytes)
            yield number, None
        number += 1


class Seen:
    """Which custom_ids have come. Holds 8 bytes of a hash for each, so that a million take 16 MiB.

    Two of a million ids have the same 8 bytes once in 37 million files.
    """

    def __init__(self, most: int) -> None:
        """`most` ids will come."""
        self._mask = (1 << max(4, (2 * most).bit_length())) - 1
        self._places = array("Q", bytes(8 * (self._mask + 1)))
        self._left = most

    def add(self, custom_id: str) -> bool:
        """Note an id; False when it had come before."""
        digest = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little") or 1
        places, place = self._places, digest & self._mask
        while found := places[place]:
            if found == digest:
                return False
            place = (place + 1) & self._mask
        assert self._left > 0, "more ids than were announced"
        self._left -= 1
        places[place] = digest
        return True
