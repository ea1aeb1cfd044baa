"""Files on disk: whole or not at all."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_files import store as module
from prelay_files.errors import FileMissing, FileTooLarge, StorageFailed
from prelay_files.store import FileLimits, FileStore, StoredFile, Writing, check_root

WIDE = FileLimits(10**9, 10**6, 10**6)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def put(store: FileStore, content: bytes = b"{}\n", purpose: str = "batch", name: str = "in.jsonl") -> StoredFile:
    with store.create(purpose, name) as writing:
        writing.write(content)
        return writing.commit()


def on_disk(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "files").iterdir())


def test_what_was_committed_is_read_back(store: FileStore) -> None:
    file = put(store, b"a\n\nb", name="naïve.jsonl")
    assert store.get(file.id) == file
    assert (file.bytes, file.lines, file.purpose, file.filename) == (4, 3, "batch", "naïve.jsonl")
    with store.open(file.id) as content:
        assert content.read() == b"a\n\nb"


def test_without_a_commit_nothing_is_left(store: FileStore, tmp_path: Path) -> None:
    with store.create("batch", "in.jsonl") as writing:
        writing.write(b"x" * 100_000)
        assert store.list(limit=10) == []
    assert on_disk(tmp_path) == []
    with pytest.raises(FileMissing):
        store.open(writing.id)


def test_an_aborted_file_stays_aborted(store: FileStore, tmp_path: Path) -> None:
    writing = store.create("batch", "in.jsonl")
    writing.abort()
    writing.abort()
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "file-", "", "file-" + "G" * 24, "file-" + "0" * 24 + "\n", "."])
def test_what_is_no_id_is_no_file(store: FileStore, name: str) -> None:
    for ask in (store.get, store.open, store.delete):
        with pytest.raises(FileMissing):
            ask(name)


def test_a_reader_of_a_deleted_file_reads_it_to_its_end(store: FileStore, tmp_path: Path) -> None:
    file = put(store, b"x" * 300_000)
    with store.open(file.id) as content:
        store.delete(file.id)
        assert len(content.read()) == 300_000
    assert on_disk(tmp_path) == []
    with pytest.raises(FileMissing):
        store.delete(file.id)


def test_files_are_listed_by_age_in_pages(store: FileStore) -> None:
    files = sorted((put(store, purpose="batch" if at % 2 else "batch_output") for at in range(7)), key=lambda f: f.id)
    assert store.list(limit=10, newest_first=False) == files
    assert store.list(limit=3) == files[:3:-1]
    assert store.list(limit=3, after=files[4].id) == files[3:0:-1]
    assert store.list(limit=3, after=files[4].id, newest_first=False) == files[5:]
    assert {file.purpose for file in store.list(limit=10, purpose="batch")} == {"batch"}


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_lines_are_counted_however_the_file_is_cut_into_pieces(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int]
) -> None:
    store = FileStore(tmp_path_factory.getbasetemp() / "cut")
    with store.create("batch", "x", WIDE) as writing:
        for piece in pieces(content, cuts):
            writing.write(piece)
        assert writing.bytes == len(content)
        assert writing.lines == content.count(b"\n") + (content[-1:] not in (b"", b"\n"))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=5),
    st.builds(FileLimits, st.integers(1, 30), st.integers(1, 6), st.integers(1, 6)),
)
def test_a_file_is_refused_exactly_when_it_is_beyond_a_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ended: bool, cuts: list[int], limits: FileLimits
) -> None:
    content = b"\n".join(b"x" * size for size in sizes) + (b"\n" if ended else b"")
    lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    fits = len(content) <= limits.bytes and lines <= limits.lines and max(sizes) <= limits.line_bytes
    store = FileStore(tmp_path_factory.getbasetemp() / "limits")
    with store.create("batch", "x", limits) as writing:
        assert fits == takes(writing, pieces(content, cuts))


def takes(writing: Writing, all_pieces: Iterator[bytes]) -> bool:
    try:
        for piece in all_pieces:
            writing.write(piece)
    except FileTooLarge:
        return False
    return True


def pieces(content: bytes, cuts: list[int]) -> Iterator[bytes]:
    begin = 0
    for cut in sorted(cuts):
        yield content[begin:cut]
        begin = max(begin, min(cut, len(content)))
    yield content[begin:]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (FileLimits(3, 10, 10), "the file has more bytes than the 3 that are taken: 8 came"),
        (FileLimits(10, 2, 10), "the file has more lines than the 2 that are taken: 3 came"),
        (FileLimits(10, 10, 2), "line 2 of the file has more bytes than the 2 that are taken"),
    ],
)
def test_a_refusal_names_the_limit_and_the_value(store: FileStore, limits: FileLimits, message: str) -> None:
    with store.create("batch", "x", limits) as writing, pytest.raises(FileTooLarge) as refused:
        writing.write(b"a\nbbbb\nc")
    assert str(refused.value) == message


HOLDER = """
import sys, pathlib
from prelay_files.store import FileStore
writing = FileStore(pathlib.Path(sys.argv[1])).create("batch", "x")
writing.write(b"x" * 100_000)
print(writing.id, flush=True)
sys.stdin.read()
"""


def test_what_a_dead_process_was_writing_is_swept_and_what_a_live_one_writes_is_not(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_S", -1.0)
    kept = put(store)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        name = holder.stdout.readline().decode().strip()
        assert store.sweep() == []
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert store.sweep() == [f".part-{name}"]
    assert [file.id for file in store.list(limit=9)] == [kept.id]


def test_content_without_a_description_is_swept(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(store)
    (tmp_path / "files" / f"{file.id}.json").unlink()
    assert store.sweep() == []  # it may be of this moment
    monkeypatch.setattr(module, "STALE_S", -1.0)
    assert store.sweep() == [file.id]


def test_a_full_disk_is_told_and_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with store.create("batch", "x") as writing, pytest.raises(StorageFailed, match="the disk does not take it"):
            writing.write(b"x" * 60_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert on_disk(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_told_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_root(tmp_path)
    assert on_disk(tmp_path) == []
    (tmp_path / "a file").touch()
    with pytest.raises(StorageFailed, match=f"files_dir {tmp_path / 'a file'} cannot be used: .*Not a directory"):
        check_root(tmp_path / "a file")

    def refused(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("prelay_files.store.os.open", refused)
    with pytest.raises(StorageFailed, match=f"files_dir {tmp_path} cannot be used: .*Read-only"):
        check_root(tmp_path)


def test_only_its_owner_may_look_into_the_folder(store: FileStore, tmp_path: Path) -> None:
    file = put(store)
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0
    assert (tmp_path / "files" / file.id).stat().st_mode & 0o077 == 0
