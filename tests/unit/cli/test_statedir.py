"""The state directory: one supervisor, private, with a socket path that fits."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prelay.errors import StateDirError
from prelay.statedir import SOCKET_PATH_MAX, StateDir


def test_it_is_made_for_its_owner_only(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(state.server.stat().st_mode) == 0o700
    assert state.socket == state.server / "redis.sock"
    state.close()


def test_a_second_supervisor_is_told_who_has_it(tmp_path: Path) -> None:
    first = StateDir(tmp_path)
    with pytest.raises(StateDirError, match=f"in use by another prelay serve .pid {os.getpid()}."):
        StateDir(tmp_path)
    first.close()
    StateDir(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "import sys; from prelay.statedir import StateDir; from pathlib import Path\n"
    code += f"s = StateDir(Path({str(tmp_path)!r}))\nprint('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StateDirError, match=f"pid {holder.pid}"):
            StateDir(tmp_path)
        holder.kill()
        holder.wait()
        StateDir(tmp_path).close()


def test_a_long_path_gets_a_short_socket_in_a_private_directory_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    state = StateDir(tmp_path / ("long" * 30))
    assert len(os.fsencode(state.socket)) <= SOCKET_PATH_MAX
    folder = state.socket.parent
    assert folder != state.server
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    state.close()
    assert not folder.exists()


def test_a_socket_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    root = tmp_path / ("long" * 30)
    state = StateDir(root)
    folder = state.socket.parent
    state.close()
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(StateDirError, match="nobody else can enter"):
            StateDir(root)
    finally:
        folder.unlink()


def test_no_short_path_anywhere_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("runtime" * 20)))
    with pytest.raises(StateDirError, match=r"too long for a socket .107 bytes"):
        StateDir(tmp_path / ("long" * 30))


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir(mode=0o755)
    with pytest.raises(StateDirError, match="chmod 700"):
        StateDir(tmp_path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StateDirError, match=r"^cannot use the state directory /proc/none: No such file or directory$"):
        StateDir(Path("/proc/none"))


def test_a_file_in_the_place_of_the_directory_or_of_one_above_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StateDirError) as refused:
        StateDir(file)
    assert str(refused.value) == (
        f"cannot use the state directory {file}: it is a file, not a directory; name another --state-dir"
    )
    with pytest.raises(StateDirError, match=f"{file}/deep/state: {file} is a file, not a directory"):
        StateDir(file / "deep" / "state")
