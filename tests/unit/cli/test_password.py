"""The password of Redis comes out of a file, whole, and never into a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from prelay.errors import BadUsage
from prelay.password import with_password
from prelay.settings import load


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=40))
def test_any_password_reaches_the_server_as_it_stands_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, password: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "password"
    file.write_text(f"{password}\n", encoding="utf-8")
    for url in ("redis://queue:6380/2", "rediss://worker@queue:6380/2?ssl_check_hostname=true"):
        found = redis.ConnectionPool.from_url(with_password(url, file)).connection_kwargs
        assert (found["password"], found["host"], found["port"], found["db"]) == (password, "queue", 6380, 2)
        assert found.get("username") == ("worker" if "worker" in url else None)


def test_a_unix_socket_has_one_too(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush")
    found = redis.ConnectionPool.from_url(with_password("unix:///run/q.sock", tmp_path / "password")).connection_kwargs
    assert (found["password"], found["path"]) == ("hush", "/run/q.sock")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must have one line, the password, not 0 lines"),
        (b"\n", "must have one line, the password, not 1 lines"),
        (b"hush\nhush\n", "must have one line, the password, not 2 lines"),
        (b"\xff", "cannot be read: it is no text"),
        (b"h" * 4097, "must have at most 4096 bytes"),
    ],
)
def test_a_file_that_holds_no_password_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(BadUsage) as caught:
        with_password("redis://queue", file)
    assert str(caught.value) == f"redis_password_file {file} {words}"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"redis_password_file \S+ cannot be read: No such file"):
        with_password("redis://queue", tmp_path / "none")


@pytest.mark.parametrize("url", ["redis://:hush@queue", "redis://queue?password=hush"])
def test_two_passwords_are_one_too_many(tmp_path: Path, url: str) -> None:
    with pytest.raises(BadUsage, match="which of the two") as caught:
        with_password(url, tmp_path / "password")
    assert "hush" not in str(caught.value)


def test_a_child_gets_the_url_with_the_password_and_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush")
    settings = load({"redis_url": "redis://queue", "redis_password_file": str(tmp_path / "password")}, None)
    assert settings.url == "redis://:hush@queue"
    assert settings.jobs_url == settings.url
    found = settings.environment()
    assert found["PRELAY_REDIS_URL"] == settings.url
    assert "PRELAY_REDIS_PASSWORD_FILE" not in found
    assert "hush" not in repr(settings)


def test_a_password_for_no_server_is_refused() -> None:
    with pytest.raises(BadUsage, match="redis_password_file needs a --redis-url"):
        load({"redis_password_file": "/nowhere"}, None)
