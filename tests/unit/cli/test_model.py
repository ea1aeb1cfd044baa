"""From what the user calls a model to a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prelay import model
from prelay.errors import ModelUnavailable
from prelay.main import main
from prelay.model import resolve_model, served_name

Told = list[tuple[str, float]]


def ignore(what: str, done: float) -> None:
    del what, done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "tokenizer.json").write_text("{}")
    return made


def test_a_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder), ignore) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model", ignore) == folder
    assert resolve_model("./my-model", ignore) == folder


def test_the_model_of_the_environment_is_looked_for_unless_another_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRELAY_MODEL", str(folder))
    assert main(["model", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert main(["model", "path", str(folder / "none")]) == 1
    assert "none: no such folder" in capsys.readouterr().err


def test_a_folder_without_its_files_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        resolve_model(str(tmp_path), ignore)


@pytest.mark.parametrize("value", ["/no/such/folder", "no-such-model", "./a/b/c", ""])
def test_what_is_no_model_is_one_line(value: str) -> None:
    with pytest.raises(ModelUnavailable, match=r"no such folder or \.gguf file, and not a hub id"):
        resolve_model(value or "nothing", ignore)


def test_the_name_that_clients_ask_for() -> None:
    assert served_name(None, Path("/cache/demo-1/SmolLM2")) == "SmolLM2"
    assert served_name("/models/big", Path("/models/big")) == "big"
    assert served_name("/models/big.Q4.gguf", Path("/cache/big.Q4-0a1b")) == "big.Q4"
    assert served_name("maker/model", Path("/hub/snapshots/0a1b")) == "maker/model"


def test_a_gguf_file_that_is_missing_or_broken_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRELAY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelUnavailable, match="No such file"):
        resolve_model(str(tmp_path / "none.gguf"), ignore)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + os.urandom(64))
    with pytest.raises(ModelUnavailable, match=r"cannot convert .*bad\.gguf: ") as refused:
        resolve_model(str(tmp_path / "bad.gguf"), ignore)
    assert "\n" not in str(refused.value)
    assert [path.name for path in (tmp_path / "cache" / "gguf-1").iterdir()] == ["lock"]


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRELAY_CACHE_DIR", str(tmp_path / "cache"))
    calls: list[Path] = []

    def convert(gguf: Path, made: Path, progress: object) -> None:
        calls.append(gguf)
        made.mkdir()

    monkeypatch.setattr(model, "_convert_into", convert)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    first = resolve_model(str(file), ignore)
    assert resolve_model(str(file), ignore) == first
    assert len(calls) == 1
    file.write_bytes(b"another")
    assert resolve_model(str(file), ignore) != first


def test_without_a_network_a_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise OSError("cannot connect\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelUnavailable, match=r"maker/model: no such folder here, .* \(cannot connect\)$"):
        resolve_model("maker/model", ignore)


def test_a_hub_model_is_fetched_without_pickles(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import huggingface_hub

    asked: dict[str, object] = {}

    def online(name: str, **how: object) -> str:
        asked.update(how, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", online)
    (folder / "model.safetensors").touch()
    told: Told = []
    assert resolve_model("maker/model", lambda what, done: told.append((what, done))) == folder
    assert asked["name"] == "maker/model"
    assert not any("bin" in pattern or "pt" in pattern for pattern in json.dumps(asked["allow_patterns"]).split(","))
    assert told == [("fetching maker/model", 0.0), ("fetching maker/model", 1.0)]
