"""Put a file of results in the order of the input."""

from __future__ import annotations

import os
import re
from array import array
from typing import BinaryIO

from ..errors import CliError

#: The end of a result line's id is the number of its line in the input. It stands at the line's beginning.
_LINE_NUMBER = re.compile(rb'"id"\s*:\s*"batch_req_[0-9A-Za-z-]+_(\d{1,12})"')
_HEAD_BYTES = 200


def in_order(unordered: BinaryIO, into: BinaryIO) -> None:
    """Copy lines of a real file by the number of their input line. Keeps some 60 bytes of each in memory.

    Raise CliError for a line whose id has no number: those of another server.
    """
    numbers, places = array("q"), array("q", [0])
    unordered.seek(0)
    for line in unordered:
        found = _LINE_NUMBER.search(line, 0, _HEAD_BYTES)
        if found is None:
            raise CliError(f"--ordered: result {len(numbers) + 1} has no line number in its id; leave --ordered out")
        numbers.append(int(found[1]))
        places.append(places[-1] + len(line))
    file = unordered.fileno()
    for index in sorted(range(len(numbers)), key=numbers.__getitem__):
        line = os.pread(file, places[index + 1] - places[index], places[index])
        into.write(line if line.endswith(b"\n") else line + b"\n")
