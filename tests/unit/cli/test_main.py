"""The command as a user types it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prelay import __version__
from prelay.main import main

ROOT = Path(__file__).parents[3]


def prelay(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prelay", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ == project["version"]
    assert prelay("--version").stdout == f"prelay {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from prelay.main import main; main(['--help']); print([m for m in sys.modules if m in"
    code += " ('torch', 'transformers', 'pydantic', 'redis', 'httpx', 'fastapi', 'tokenizers')], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "api",
        "prefill",
        "decode",
        "unified",
        "batch-worker",
        "doctor",
        "chat",
        "model fetch-demo",
        "model path",
        "batch run",
        "batch submit",
        "batch status",
        "batch cancel",
        "batch download",
        "top",
        "drain",
        "trace",
        "jobs ls",
        "jobs show",
        "jobs cancel",
        "jobs preempt",
        "dead ls",
        "dead retry",
        "dead drop",
        "bench serve",
        "bench pipeline",
        "bench engine",
    ],
)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples" in shown
    assert f"$ prelay {command.split()[0]}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "70000"], "prelay: --port must be at most 65535, not 70000"),
        (["serve", "--nonsense"], "No such option: --nonsense"),
        (["serve", "extra"], "unexpected extra argument"),
        (["nonsense"], "No such command 'nonsense'"),
        (["decode"], "prelay: --redis-url is needed"),
        (["batch-worker", "--redis-url", "redis://x"], "prelay: --files-dir is needed"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
        (["batch", "run", "-o", "x"], "prelay: no INPUT: name a file of requests"),
        (["batch", "run", "/none.jsonl", "-o", "x"], "prelay: cannot read /none.jsonl: No such file"),
        (["batch", "run", "x", "-o", "x", "--max-tokens", "0"], "--max-tokens"),
        (["batch", "status", "--watch"], "prelay: --watch needs the ID of a batch"),
        (["bench", "serve", "--concurrency", "0"], "--concurrency must be whole numbers of at least 1"),
        (["bench", "serve", "--rate", "1", "--concurrency", "1"], "give one of them"),
        (["bench", "serve", "--plot", "x.png"], "--plot writes SVG"),
        (["bench", "pipeline", "--streams", "a"], "--streams must be whole numbers"),
        (["serve", "--config", "/none.toml"], "prelay: --config: cannot read /none.toml"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_two(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("PRELAY_MODEL", str(tmp_path))
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_secrets_on_the_command_line_leave_it_before_anything_else_happens() -> None:
    code = """
import os, sys
import prelay.main as main
def show(program, arguments, environment):
    names = ("PRELAY_REDIS_URL", "PRELAY_API_KEY", "PRELAY_BATCH_REDIS_URL")
    print(arguments[1:], *map(environment.get, names))
os.execve = show
for words in (["serve", "--redis-url", "redis://:hush@q/0", "--port", "1"], ["serve", "--redis-url=redis://:hush@q/0"],
              ["serve", "--redis-url", "redis://q/0"], ["serve", "--redis-url"],
              ["serve", "--api-key", "k1", "--port", "1", "--api-key=k2", "--redis-url", "redis://q/0"],
              ["serve", "--batch-redis-url", "redis://:hush@j/0", "--redis-url=redis://:hush@q/0"],
              ["serve", "--api-key"], ["serve", "--api-key", ""], ["serve", "--api-key-file", "keys"]):
    main._hide_secrets(words)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['-P', '-m', 'prelay', 'serve', '--port', '1'] redis://:hush@q/0 None None",
        "['-P', '-m', 'prelay', 'serve'] redis://:hush@q/0 None None",
        "['-P', '-m', 'prelay', 'serve', '--port', '1', '--redis-url', 'redis://q/0'] None k1,k2 None",
        "['-P', '-m', 'prelay', 'serve'] redis://:hush@q/0 None redis://:hush@j/0",
    ]
