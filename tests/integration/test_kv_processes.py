"""KV hand-over between real processes: an exporter in a process of its own, the importer in this one.

Only references and checksums go through the exporter's pipe; the bytes themselves can only come through the mapping.
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from prelay_kv.errors import LayoutMismatch, SegmentGone, StaleKv
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool
from prelay_kv.sweep import sweep
from tests.bed.servers import die_with_parent

EXPORTER = Path(__file__).with_name("kv_exporter.py")


class Forks:
    """The process that forks exporters."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(EXPORTER), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent)
        self._link = ours
        self._link.settimeout(60)

    def ask(self, *words: str, fds: Sequence[int] = ()) -> int:
        socket.send_fds(self._link, ["\n".join(words).encode()], fds)
        return int(self._link.recv(100))

    def close(self) -> None:
        self._link.close()
        assert self._process.wait(20) == 0


class Exporter:
    """A running kv_exporter.py, and what it last said about its pool."""

    def __init__(self, forks: Forks, folder: Path, owner: str) -> None:
        self._forks = forks
        self._code: int | None = None
        (commands, to), (fro, replies) = os.pipe(), os.pipe()
        self._input, self._output = os.fdopen(to, "wb"), os.fdopen(fro, "rb")
        try:
            self._pid = forks.ask("start", str(folder), owner, fds=(commands, replies))
        finally:
            os.close(commands)
            os.close(replies)
        self._read_pool()

    def _read_pool(self) -> None:
        said = self._reply()
        self.ref = KvRef.decode(said["ref"].encode())
        self.digests: list[str] = said["digests"]

    def _reply(self) -> Any:
        line = self._output.readline()
        assert line, f"the exporter ended with {self.wait()}"
        return orjson.loads(line)

    def send(self, command: str) -> None:
        self._input.write(command.encode() + b"\n")
        self._input.flush()

    def refilled(self) -> None:
        """Read the answer to "refill"."""
        self._read_pool()

    def ask(self, command: str) -> Any:
        self.send(command)
        return self._reply()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        if self._code is None:
            self._code = self._forks.ask("end", str(self._pid))
        return self._code

    def kill(self) -> None:
        """SIGKILL, and return when the process is gone."""
        os.kill(self._pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def end(self) -> None:
        if self._code is None:
            self.kill()
        self._input.close()
        self._output.close()


@pytest.fixture(scope="module")
def shm_dir() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"prelay-test-{secrets.token_hex(6)}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with closing(Forks()) as found:
        yield found


@pytest.fixture(scope="module")
def living_process(forks: Forks, shm_dir: Path) -> Iterator[Exporter]:
    exporter = Exporter(forks, shm_dir, "living")
    yield exporter
    exporter.end()
    assert sweep(shm_dir) == (exporter.ref.segment.handle,)


@pytest.fixture
def living(living_process: Exporter) -> Exporter:
    """An exporter with a fresh pool, for the tests that do not end it."""
    living_process.send("refill")
    living_process.refilled()
    return living_process


@pytest.fixture
def start(forks: Forks, shm_dir: Path) -> Iterator[Callable[..., Exporter]]:
    """Starts an exporter of the test's own; at the end it is killed and swept."""
    started: list[Exporter] = []

    def begin(owner: str = "exporter") -> Exporter:
        started.append(Exporter(forks, shm_dir, owner))
        return started[-1]

    yield begin
    for exporter in started:
        exporter.end()
    sweep(shm_dir)


@pytest.fixture(autouse=True)
def nothing_is_left(shm_dir: Path) -> Iterator[None]:
    """After each test: no file but the living exporter's, and nothing mapped or open in this process."""
    yield
    left = [path.name for path in shm_dir.iterdir() if not path.name.startswith("prelay-living-")]
    for name in left:
        (shm_dir / name).unlink()
    assert left == []
    assert mapped(shm_dir) == 0
    descriptors = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [target for target in descriptors if target.is_relative_to(shm_dir)]


def mapped(folder: Path) -> int:
    """Mappings of this process below `folder`."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


@pytest.fixture
def importer(shm_dir: Path) -> Iterator[Importer]:
    with closing(Importer("1a2b", "3c4d", domain(shm_dir), shm_dir)) as importer:
        yield importer


def digests(blocks: torch.Tensor) -> list[str]:
    return [hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for block in blocks]


class Copied:
    """Copies the first half of the blocks, does something, and copies the rest."""

    def __init__(self, midway: Callable[[], object] = lambda: None) -> None:
        self.blocks = torch.empty(0)
        self._midway = midway

    def __call__(self, pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
        half = len(blocks) // 2
        first = pool[list(blocks[:half])]
        self._midway()
        self.blocks = torch.cat([first, pool[list(blocks[half:])]])

    def digests(self) -> list[str]:
        return digests(self.blocks)


def test_what_one_process_writes_another_reads(living: Exporter, importer: Importer) -> None:
    copied = Copied()
    importer.fetch(living.ref, copied)
    assert copied.digests() == living.digests
    # And what it writes later, through the mapping that is already there
    living.send("refill")
    living.refilled()
    importer.fetch(living.ref, copied)
    assert copied.digests() == living.digests


def test_two_exporters_are_not_mixed_up(living: Exporter, start: Callable[..., Exporter], importer: Importer) -> None:
    other = start("other")
    for exporter in (living, other, living):
        copied = Copied()
        importer.fetch(exporter.ref, copied)
        assert copied.digests() == exporter.digests
    assert importer.owners() == {"living", "other"}


def test_blocks_reused_during_the_copy_are_stale(living: Exporter, importer: Importer) -> None:
    with pytest.raises(StaleKv) as caught:
        importer.fetch(living.ref, Copied(midway=lambda: living.ask("raise")))
    assert caught.value.blocks == living.ref.blocks
    with pytest.raises(StaleKv):
        importer.fetch(living.ref, Copied())


def test_a_copy_that_races_with_reuse_is_right_or_stale(living: Exporter, importer: Importer) -> None:
    outcomes = {"right": 0, "stale": 0}
    for turn in range(60):
        ref, promised = living.ref, living.digests
        copied = Copied(midway=(lambda: living.send("refill")) if turn % 2 else (lambda: None))
        if turn % 2 == 0 and turn % 4:  # asked before the copy; otherwise in its middle, or after it
            living.send("refill")
        try:
            importer.fetch(ref, copied)
        except StaleKv:
            outcomes["stale"] += 1
        else:
            assert copied.digests() == promised
            outcomes["right"] += 1
        if turn % 4 == 0:
            living.send("refill")
        living.refilled()
    assert outcomes["right"] >= 15  # every fourth was undisturbed


def test_an_owner_killed_before_anyone_mapped_it_leaves_good_bytes_until_it_is_swept(
    shm_dir: Path, start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter, copied = start(), Copied()
    exporter.kill()
    importer.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    importer.forget("exporter")
    assert sweep(shm_dir) == (exporter.ref.segment.handle,)
    with pytest.raises(SegmentGone):
        importer.fetch(exporter.ref, copied)


def test_an_owner_killed_after_it_was_mapped_can_be_read_after_the_sweep(
    shm_dir: Path, start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter, copied = start(), Copied()
    importer.fetch(exporter.ref, Copied())
    exporter.kill()
    assert sweep(shm_dir) == (exporter.ref.segment.handle,)
    importer.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    # A generation that it raised before it died still tells
    with pytest.raises(StaleKv):
        importer.fetch(replace(exporter.ref, generations=(1,) * 64), Copied())
    assert mapped(shm_dir) == 1
    importer.forget("exporter")
    assert mapped(shm_dir) == 0


def test_an_owner_killed_and_swept_in_the_middle_of_a_copy_does_not_disturb_it(
    shm_dir: Path, start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter = start()

    def die() -> None:
        exporter.kill()
        importer.forget("exporter")
        assert sweep(shm_dir) == (exporter.ref.segment.handle,)

    copied = Copied(midway=die)
    importer.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests
    assert mapped(shm_dir) == 0


def test_an_owner_killed_in_the_middle_of_reuse_leaves_stale_blocks(
    start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter = start()

    def reuse_and_die() -> None:
        exporter.ask("raise")
        exporter.send("refill")
        exporter.kill()  # somewhere in the refill

    with pytest.raises(StaleKv):
        importer.fetch(exporter.ref, Copied(midway=reuse_and_die))


def test_an_owner_that_closes_leaves_running_peers_their_bytes(
    shm_dir: Path, start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter, copied = start(), Copied()
    importer.fetch(exporter.ref, Copied())
    assert exporter.ask("close") == "closed"
    assert exporter.wait() == 0
    assert not (shm_dir / exporter.ref.segment.handle).exists()
    importer.fetch(exporter.ref, copied)
    assert copied.digests() == exporter.digests


def test_a_worker_of_another_layout_refuses(living: Exporter, shm_dir: Path) -> None:
    with closing(Importer("other", "3c4d", domain(shm_dir), shm_dir)) as importer:
        with pytest.raises(LayoutMismatch):
            importer.fetch(living.ref, Copied())
        assert mapped(shm_dir) == 0


def test_a_sweep_leaves_a_living_process_s_pool_and_removes_a_killed_one_s(
    shm_dir: Path, living: Exporter, start: Callable[..., Exporter], importer: Importer
) -> None:
    dying, copied = start("dying"), Copied()
    dying.kill()
    assert sweep(shm_dir) == (dying.ref.segment.handle,)
    importer.fetch(living.ref, copied)
    assert copied.digests() == living.digests


SWEEPER = """
import sys
from pathlib import Path
from prelay_kv.sweep import sweep
print("ready", flush=True)
removed = 0
while not (Path(sys.argv[1]) / "stop").exists():
    removed += len(sweep(Path(sys.argv[1])))
print(removed)
"""


def test_owners_start_and_end_while_two_processes_sweep_without_pause(shm_dir: Path) -> None:
    layout = KvLayout(1, 2, 2, 4, 8, dtype="float32", layout_hash="1a2b", numerics_hash="3c4d")
    sweepers = [
        subprocess.Popen([sys.executable, "-c", SWEEPER, str(shm_dir)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for sweeper in sweepers:
            assert sweeper.stdout is not None
            assert sweeper.stdout.readline() == "ready\n"
        left = 0
        for number in range(300):
            pool = ShmPool.create(f"owner-{number}", layout, shm_dir)
            pool.tensor.fill_(1)
            assert pool.path.stat().st_nlink == 1
            left += number % 2
            pool.close(unlink=number % 2 == 0)
    finally:
        (shm_dir / "stop").touch()
        removed = [int(sweeper.communicate(timeout=30)[0]) for sweeper in sweepers]
    (shm_dir / "stop").unlink()
    assert sum(removed) + len(sweep(shm_dir)) >= left


WRITER = """
import resource, sys
from pathlib import Path
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
folder, raw = Path(sys.argv[1]), sys.stdin.buffer.read()
def write(pool, blocks):
    print("copying", flush=True)
    pool[0] = 0
Importer("1a2b", "3c4d", domain(folder), folder).fetch(KvRef.decode(raw), write)
print("wrote", flush=True)
"""


def test_an_importer_cannot_write_a_peer_s_memory(shm_dir: Path, living: Exporter, importer: Importer) -> None:
    copied = Copied()
    writer = subprocess.run(
        [sys.executable, "-c", WRITER, str(shm_dir)], input=living.ref.encode(), stdout=subprocess.PIPE, check=False
    )
    assert writer.returncode == -signal.SIGSEGV
    assert writer.stdout == b"copying\n"
    importer.fetch(living.ref, copied)
    assert copied.digests() == living.digests


def test_copies_on_several_threads_survive_the_owner_s_death(
    shm_dir: Path, start: Callable[..., Exporter], importer: Importer
) -> None:
    exporter = start()
    copies = [Copied() for _ in range(40)]
    importer.fetch(exporter.ref, Copied())
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(importer.fetch, exporter.ref, copied) for copied in copies]
        exporter.kill()
        sweep(shm_dir)
        for job in jobs:
            job.result()
    assert all(copied.digests() == exporter.digests for copied in copies)
    importer.forget("exporter")
    assert mapped(shm_dir) == 0
