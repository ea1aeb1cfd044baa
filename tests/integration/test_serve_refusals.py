"""What `prelay serve` says when it cannot: one line, before anything was started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.ports import free_port
from tests.integration.serve_process import environment


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model until its weights are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def refused(*arguments: str) -> tuple[int, str]:
    """Run a `prelay serve` and return its exit code and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prelay", "serve", "--port", str(free_port()), *arguments],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_given_server_that_is_dead_is_one_line_and_nothing_has_to_be_stopped(model: Path) -> None:
    code, shown = refused("--model", str(model), "--redis-url", "redis://127.0.0.1:1/0")
    assert code == 1
    assert shown.startswith("prelay: redis://127.0.0.1:1/0: Redis does not answer: ")
    assert shown.count("\n") == 1


def test_a_longer_sequence_than_the_model_can_is_one_line_and_no_workers(model: Path, tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    code, shown = refused("--model", str(model), *state, "--max-model-len", "513")
    assert (code, shown) == (2, "prelay: --max-model-len must be at most the model's 512, not 513\n")


def test_a_state_directory_that_is_a_file_is_one_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, shown = refused("--model", str(model), "--state-dir", str(file))
    words = f"cannot use the state directory {file}: it is a file, not a directory; name another --state-dir"
    assert (code, shown) == (1, f"prelay: {words}\n")
