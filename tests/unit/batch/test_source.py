"""The input file, line by line."""

from __future__ import annotations

import codecs
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_batch.source import Seen, lines_of


def read(content: bytes, most: int = 100) -> list[tuple[int, bytes | None]]:
    return list(lines_of(io.BytesIO(content), most))


def test_blank_lines_are_counted_and_left_out() -> None:
    content = codecs.BOM_UTF8 + b"\r\n{1}\n\n \t\n{4}\r\n{5}"
    assert read(content) == [(1, b"{1}\n"), (4, b"{4}\r\n"), (5, b"{5}")]


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\n  "])
def test_a_file_may_have_no_lines(content: bytes) -> None:
    assert read(content) == []


@pytest.mark.parametrize("length", [101, 150, 199, 200, 201, 1000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_is_too_long_is_told_and_not_held(length: int, end: bytes) -> None:
    long = b"x" * (length - len(end)) + end
    following: list[tuple[int, bytes | None]] = [(2, b"b")] if end else []
    assert read(b"a\n" + long + (b"b" if end else b"")) == [(0, b"a\n"), (1, None), *following]


def test_a_line_of_just_the_limit_is_whole() -> None:
    assert read(b"x" * 99 + b"\n") == [(0, b"x" * 99 + b"\n")]


@given(st.lists(st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")), max_size=20))
def test_numbers_are_those_of_the_file_s_lines(parts: list[bytes]) -> None:
    content = b"\n".join(parts)
    for number, raw in read(content):
        assert raw is not None
        assert raw.rstrip(b"\n") == parts[number]
    assert [raw for _, raw in read(content)] == [raw for raw in content.splitlines(keepends=True) if raw.strip()] or (
        b"\r" in content or codecs.BOM_UTF8 in content or b"\x0b" in content or b"\x0c" in content
    )


@given(st.lists(st.text(max_size=4), max_size=60))
def test_an_id_is_new_the_first_time_only(ids: list[str]) -> None:
    seen, known = Seen(len(ids)), set()
    for each in ids:
        assert seen.add(each) == (each not in known)
        known.add(each)


def test_many_ids_are_told_apart_in_little_memory() -> None:
    seen = Seen(50_000)
    assert all(seen.add(f"request-{n}") for n in range(50_000))
    assert not any(seen.add(f"request-{n}") for n in range(0, 50_000, 7))
    assert len(seen._places) * 8 <= 2**20
