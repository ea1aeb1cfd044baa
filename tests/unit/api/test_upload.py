"""A form that is cut anywhere on its way is read as if it came at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_api.upload import Upload, boundary_of
from prelay_files.store import FileLimits, FileStore, StoredFile
from prelay_text.errors import RequestError

LIMITS = FileLimits(10_000, 1_000, 10_000)
BOUNDARY = b"xyz"


def form(content: bytes, name: str = 'a".jsonl') -> bytes:
    """As browsers and httpx write it."""
    shown = name.replace('"', "%22").encode()
    return (
        b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="' + shown + b'"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n--xyz--\r\n"
    )


def take(store: FileStore, pieces: list[bytes]) -> StoredFile:
    upload = Upload(store, LIMITS, BOUNDARY)
    try:
        for piece in pieces:
            upload.feed(piece)
        return upload.finish()
    finally:
        upload.abort()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    return FileStore(tmp_path_factory.mktemp("kept"))


#: What looks like a boundary and is none.
LOOKALIKES = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"-", b"--", b"\r\n--", b"\r\n--xy", b"xyz", b"--xyz", b"\r\n--xzz"]
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.one_of(LOOKALIKES, st.binary(max_size=8)), min_size=1).map(b"".join).filter(len),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_the_file_is_what_was_sent_wherever_it_is_cut(store: FileStore, content: bytes, cuts: list[int]) -> None:
    if b"\r\n--xyz" in b"\r\n" + content + b"\r\n--":
        return  # a client would have taken another boundary
    whole = form(content)
    edges = [0, *sorted(cuts), len(whole)]
    file = take(store, [whole[begin:end] for begin, end in pairwise(edges)])
    with store.open(file.id) as kept:
        assert kept.read() == content
    store.delete(file.id)


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_file_or_a_refusal_and_leaves_nothing(store: FileStore, body: bytes) -> None:
    with pytest.raises(RequestError):
        take(store, [body])
    assert store.list(limit=1) == []


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\me\\in.jsonl", "in.jsonl"),
        ("größe.jsonl", "größe.jsonl"),
        ("a\x00b", "ab"),
        ("", "upload.jsonl"),
        ("x" * 300 + ".jsonl", "x" * 249 + ".jsonl"),
    ],
)
def test_a_name_is_kept_without_its_folders(store: FileStore, given_name: str, kept: str) -> None:
    file = take(store, [form(b"{}", given_name)])
    assert file.filename == kept
    store.delete(file.id)


def test_the_boundary_stands_in_the_header() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    with pytest.raises(RequestError, match="not 'text/plain'"):
        boundary_of("text/plain")


def test_a_boundary_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the form cannot be read"):
        Upload(FileStore(tmp_path), LIMITS, b"x" * 1000)
