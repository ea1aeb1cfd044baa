"""Which batch a client's key stands for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from prelay_files.keys import KEPT_S, KeyNote, sweep

KEY = "a1" * 16


def taken(root: Path) -> KeyNote:
    note = KeyNote.take(root, KEY)
    assert note is not None
    return note


def noted(root: Path) -> tuple[str, str]:
    note = taken(root)
    note.close()
    return note.batch_id, note.digest


def test_what_was_noted_is_found_by_whoever_comes_next(tmp_path: Path) -> None:
    before = time.time()
    note = taken(tmp_path)
    assert (note.batch_id, note.digest, note.noted_at) == ("", "", 0.0)
    note.write("batch_1", "a much longer digest than the next")
    note.write("batch_2", "d")
    note.close()
    again = taken(tmp_path)
    assert (again.batch_id, again.digest) == ("batch_2", "d")
    assert before <= again.noted_at <= time.time()
    again.close()


def test_one_at_a_time_has_a_key(tmp_path: Path) -> None:
    note = taken(tmp_path)
    assert KeyNote.take(tmp_path, KEY) is None
    other = KeyNote.take(tmp_path, KEY[::-1])
    assert other is not None
    other.close()
    note.close()
    taken(tmp_path).close()


@pytest.mark.parametrize("torn", [b"", b'{"batch": "batch_1", "dig', b"[]", b'{"batch": 1}', b"\0" * 20])
def test_what_was_not_noted_to_its_end_is_nothing(tmp_path: Path, torn: bytes) -> None:
    taken(tmp_path).close()
    (tmp_path / "keys" / KEY).write_bytes(torn)
    assert noted(tmp_path) == ("", "")


def test_old_keys_go_and_those_that_are_held_or_young_stay(tmp_path: Path) -> None:
    assert sweep(tmp_path) == []
    note = taken(tmp_path)
    note.write("batch_1", "d")
    assert sweep(tmp_path) == []
    old = time.time() - KEPT_S - 1
    os.utime(tmp_path / "keys" / KEY, (old, old))
    assert sweep(tmp_path) == [], "somebody has it"
    note.close()
    assert sweep(tmp_path) == [KEY]
    assert noted(tmp_path) == ("", "")


def test_of_many_at_once_one_makes_the_batch_and_all_are_told_of_it(tmp_path: Path) -> None:
    found: list[str] = []

    def make(name: str) -> None:
        while (note := KeyNote.take(tmp_path, KEY)) is None:
            time.sleep(0.001)
        if not note.batch_id:
            note.write(name, "d")
        found.append(note.batch_id)
        note.close()

    threads = [threading.Thread(target=make, args=(f"batch_{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
