"""The ledger through crashes at any byte: every line once, and none that was checkpointed lost."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prelay_files.checkpoint import ERRORS, NAME, PARTS, RESULTS, Checkpoint
from prelay_files.errors import StorageFailed
from prelay_files.folder import BatchFolder
from prelay_files.ids import new_batch_id
from prelay_files.ledger import Ledger
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore


def new_batch(root: Path) -> BatchFolder:
    batch_id = new_batch_id()
    return BatchFolder.create(root, BatchRecord(batch_id, "/v1/completions", "file-x", 86400, 0, 86400))


def answer(batch: BatchFolder, line: int, *, ok: bool = True, words: str = "") -> bytes:
    """A line as a runner writes it."""
    usage = {"prompt_tokens": line, "completion_tokens": 2 * line, "total_tokens": 3 * line}
    response = {"status_code": 200, "body": {"usage": usage, "text": words}} if ok else None
    name = f"batch_req_{batch.id.removeprefix('batch_')}_{line}"
    return orjson.dumps({"id": name, "custom_id": f"c{line}", "response": response})


def note(ledger: Ledger, batch: BatchFolder, line: int, *, ok: bool = True, words: str = "") -> bool:
    raw = answer(batch, line, ok=ok, words=words) + b"\n" * (line % 2)  # it may bring its line break
    return ledger.append(line, ok=ok, raw=raw, prompt_tokens=line * ok, completion_tokens=2 * line * ok)


def lines_of(store: FileStore, file_id: str | None) -> list[int]:
    """Which lines of the input a result file answers. Every line of it is whole."""
    if file_id is None:
        return []
    with store.open(file_id) as content:
        return [int(orjson.loads(raw)["id"].rpartition("_")[2]) for raw in content]


@pytest.fixture
def batch(tmp_path: Path) -> BatchFolder:
    return new_batch(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def test_a_batch_of_no_lines_has_no_files(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        assert ledger.assemble(store) == (None, None)
        assert len(ledger.done) == 0


def test_a_batch_of_errors_has_an_error_file_only(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        for line in range(3):
            note(ledger, batch, line, ok=False)
        output, errors = ledger.assemble(store)
    assert output is None
    assert lines_of(store, errors) == [0, 1, 2]
    assert errors is not None
    file = store.get(errors)
    assert (file.purpose, file.filename, file.lines) == ("batch_output", f"{batch.id}_error.jsonl", 3)
    assert (ledger.completed, ledger.failed) == (0, 3)


def test_a_line_is_noted_once(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        assert note(ledger, batch, 4, words="first")
        assert not note(ledger, batch, 4, words="second")
        assert not note(ledger, batch, 4, ok=False)
        output, errors = ledger.assemble(store)
    assert lines_of(store, output) == [4]
    assert errors is None


def test_a_line_with_a_line_break_is_refused(batch: BatchFolder) -> None:
    with Ledger.take_over(batch, 1) as ledger, pytest.raises(ValueError, match="line break"):
        ledger.append(0, ok=True, raw=b"{}\n{}")


def test_assembled_twice_it_is_the_same_file(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        first = ledger.assemble(store)
        assert ledger.assemble(store) == first
    assert len(store.list(limit=9)) == 1


def test_files_of_a_run_that_did_not_live_to_announce_them_are_deleted(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        note(ledger, batch, 1, ok=False)
        ledger.assemble(store)
    with Ledger.take_over(batch, 2) as ledger:
        made = ledger.assemble(store)
    assert {file.id for file in store.list(limit=9)} == set(made)


def test_an_epoch_that_is_given_out_twice_is_two_runs(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 3) as one:
        note(one, batch, 0)
        one.checkpoint()
        with Ledger.take_over(batch, 3) as other:
            note(one, batch, 1, words="of the one")
            note(other, batch, 1, words="of the other")
            one.checkpoint()
            other.checkpoint()
        with Ledger.take_over(batch, 4) as last:
            output, _ = last.assemble(store)
    assert lines_of(store, output) == [0, 1]
    assert batch.epochs() == [3, 4]
    assert output is not None
    with store.open(output) as content:
        assert b"of the other" in content.read()


def test_an_older_run_that_wakes_late_reads_nothing_of_newer_ones(batch: BatchFolder) -> None:
    with Ledger.take_over(batch, 5) as newer:
        note(newer, batch, 0)
        newer.checkpoint()
        with Ledger.take_over(batch, 4) as older:
            assert len(older.done) == 0
        with Ledger.take_over(batch, 6) as newest:
            assert 0 in newest.done


@pytest.mark.parametrize("damage", [b"", b"\0" * 500, b"{}\n", b'{"chain":[],"totals":[1,0,0,0],"digest":""}\n\x01'])
def test_a_damaged_checkpoint_is_passed_over_and_its_lines_computed_again(
    batch: BatchFolder, store: FileStore, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
    with Ledger.take_over(batch, 2) as ledger:
        note(ledger, batch, 1)
    (batch.path / "2" / NAME).write_bytes(damage)
    with Ledger.take_over(batch, 3) as ledger:
        assert 0 in ledger.done
        assert note(ledger, batch, 1)
        output, _ = ledger.assemble(store)
    assert lines_of(store, output) == [0, 1]
    assert "run 2 is passed over" in caplog.text


def test_a_part_that_lost_bytes_is_not_trusted(batch: BatchFolder, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        ledger.checkpoint()
    (batch.path / "1" / RESULTS).write_bytes(b"")
    with Ledger.take_over(batch, 2) as ledger:
        assert len(ledger.done) == 0
    assert "bytes and has 0" in caplog.text


def test_zeros_behind_the_checkpoint_count_for_nothing(batch: BatchFolder) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        ledger.checkpoint()
    with (batch.path / "1" / RESULTS).open("ab") as part:
        part.write(b"\0" * 4096 + b"\n" + answer(batch, 1) + b"\n")
    with Ledger.take_over(batch, 2) as ledger:
        assert (0 in ledger.done, 1 in ledger.done) == (True, False)


def test_after_an_error_of_the_disk_a_ledger_is_of_no_use(batch: BatchFolder) -> None:
    ledger = Ledger.take_over(batch, 1)
    note(ledger, batch, 0)
    shutil.rmtree(batch.path)
    for _ in range(2):
        with pytest.raises(StorageFailed):
            ledger.checkpoint()
    ledger.close()


def test_a_run_that_cannot_begin_leaves_nothing_however_often_it_is_tried(
    batch: BatchFolder, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        ledger.checkpoint()
    before = sorted(batch.path.rglob("*"))

    def refused(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("prelay_files.durable.replace", refused)
        for epoch in (2, 2, 3):
            with pytest.raises(StorageFailed, match="No space left"):
                Ledger.take_over(batch, epoch)
    assert sorted(batch.path.rglob("*")) == before
    with Ledger.take_over(batch, 4) as ledger:
        assert 0 in ledger.done


def test_after_the_end_the_runs_are_gone_and_the_first_end_stands(batch: BatchFolder, store: FileStore) -> None:
    with Ledger.take_over(batch, 1) as ledger:
        note(ledger, batch, 0)
        ledger.assemble(store)
    assert batch.write_end({"status": "completed"}) == {"status": "completed"}
    assert batch.write_end({"status": "failed"}) == {"status": "completed"}
    assert batch.end() == {"status": "completed"}
    assert sorted(path.name for path in batch.path.iterdir()) == ["end.json", "record.json"]


@pytest.fixture(scope="module")
def quick_folder() -> Iterator[Path]:
    """In memory: a crash here is a cut of the file, and no disk need keep a thousand of them."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


class Runs(RuleBasedStateMachine):
    """A batch whose runners die, freeze and go on, against a model: who wrote which lines, and what was made last."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(self.folder) / new_batch_id()
        self.batch, self.store = new_batch(self.root), FileStore(self.root)
        self.epoch = 0
        self.zombies: list[Ledger] = []
        self.ledger: Ledger | None = None
        self.made_last: set[int] = set()  # of the line of runs that stands
        self.take_over()

    folder: str

    @property
    def mine(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    def take_over(self) -> None:
        self.epoch += 1
        self.ledger = Ledger.take_over(self.batch, self.epoch)
        assert self.made_last <= self.lines()
        self.made_last = self.lines()

    def lines(self) -> set[int]:
        return {line for line in range(60) if line in self.mine.done}

    @rule(line=st.integers(0, 39), ok=st.booleans(), words=st.text(max_size=20))
    def answer(self, line: int, ok: bool, words: str) -> None:
        before = line in self.mine.done
        assert note(self.mine, self.batch, line, ok=ok, words=words) is not before

    @rule()
    def checkpoint(self) -> None:
        self.mine.checkpoint()
        self.made_last = self.lines()

    @rule(cut=st.dictionaries(st.sampled_from(PARTS), st.integers(0, 400)))
    def power_cut(self, cut: dict[str, int]) -> None:
        """The runner dies; of what it wrote behind its checkpoint any part is lost."""
        self.mine.close()
        run = self.batch.path / str(self.epoch)
        link = next((link for link in last_checkpoint(run).chain if link.run == run.name), None)
        for part, kept in cut.items():
            held = link.size(part) if link else 0
            size = (run / part).stat().st_size
            with (run / part).open("r+b") as file:
                file.truncate(max(held, min(size, held + kept)))
        self.take_over()

    @rule()
    def freeze(self) -> None:
        """Another runner takes over; this one does not know."""
        self.zombies.append(self.mine)
        self.take_over()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), line=st.integers(0, 39), ok=st.booleans())
    def zombie_goes_on(self, data: st.DataObject, line: int, ok: bool) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        note(zombie, self.batch, line, ok=ok, words="zombie")
        zombie.checkpoint()

    @rule()
    def taken_over_twice(self) -> None:
        """The one that took over dies before it has done anything."""
        self.mine.close()
        self.take_over()

    @invariant()
    def each_line_once(self) -> None:
        mine = self.mine
        assert mine.completed + mine.failed == len(mine.done)

    @rule()
    def assemble(self) -> None:
        output, errors = (lines_of(self.store, made) for made in self.mine.assemble(self.store))
        self.made_last = self.lines()
        assert Counter(output + errors) == Counter(self.made_last)
        assert (len(output), len(errors)) == (self.mine.completed, self.mine.failed)
        assert self.mine.prompt_tokens == sum(output)
        assert self.mine.completion_tokens == 2 * sum(output)

    def teardown(self) -> None:
        if getattr(self, "ledger", None) is not None:
            self.assemble()
            for ledger in (self.mine, *self.zombies):
                ledger.close()
            shutil.rmtree(self.root)


def last_checkpoint(run: Path) -> Checkpoint:
    return Checkpoint.decode((run / NAME).read_bytes())


def test_every_line_is_counted_once_whatever_dies_and_none_is_lost_that_was_made_last(quick_folder: Path) -> None:
    Runs.folder = str(quick_folder)
    run_state_machine_as_test(Runs, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@given(cut=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_cut_at_any_byte_behind_the_checkpoint_whole_lines_count(quick_folder: Path, cut: int) -> None:
    root = quick_folder / "cut"
    batch = new_batch(root)
    with Ledger.take_over(batch, 1) as ledger:
        for line in range(3):
            note(ledger, batch, line)
        ledger.checkpoint()
        for line in range(3, 12):
            note(ledger, batch, line, ok=line % 2 == 0)
    kept = {}
    for part in PARTS:
        path = batch.path / "1" / part
        held = sum(len(answer(batch, line)) + 1 for line in range(3)) if part == RESULTS else 0
        size = held + cut % (path.stat().st_size - held + 1)
        path.write_bytes(path.read_bytes()[:size])
        kept[part] = path.read_bytes().count(b"\n")
    with Ledger.take_over(batch, 2) as ledger:
        assert (ledger.completed, ledger.failed) == (kept[RESULTS], kept[ERRORS])
        assert all(line in ledger.done for line in range(3))
    shutil.rmtree(root)
