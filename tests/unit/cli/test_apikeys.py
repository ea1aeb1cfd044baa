"""API keys: where they come from, what they may be, and that none shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from prelay.apikeys import api_keys, client_headers
from prelay.errors import BadUsage
from prelay.fleet import Plan
from prelay.settings import load
from prelay.sizing import Sizes


def test_keys_come_from_options_environment_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_keys(load({}, None)) == ()
    assert api_keys(load({"api_key": ["k1", "k2", "k1"]}, None)) == ("k1", "k2")
    file = tmp_path / "prelay.toml"
    file.write_text('api_key = ["t1", "t2"]\n')
    assert api_keys(load({}, str(file))) == ("t1", "t2")
    monkeypatch.setenv("PRELAY_API_KEY", "e1, e2")
    assert api_keys(load({}, str(file))) == ("e1", "e2")
    assert api_keys(load({"api_key": ["k1"]}, str(file))) == ("k1",)


def test_keys_of_a_file_are_added_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the billing service\nf1\n\n  f2  \n")
    assert api_keys(load({"api_key_file": str(file)}, None)) == ("f1", "f2")
    assert api_keys(load({"api_key_file": str(file), "api_key": ["k1", "f2"]}, None)) == ("k1", "f2", "f1")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), (b"# none\n\n", "holds no key"), (b"\xff", "it is no text"),
     (b"ok\nhush hush\n", "line 2: a key must be of printable ASCII")],
)  # fmt: skip
def test_a_file_without_a_good_key_is_an_error_and_no_open_server(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadUsage, match=words) as refused:
        api_keys(load({"api_key_file": str(file)}, None))
    assert "hush" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "hush hush", "hüsh", "hush\n", "hush" * 200, "hush,hush"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(BadUsage, match=r"^--api-key key 1 must") as refused:
        load({"api_key": [key]}, None)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("value", ["5", "[1]", "true", '[["hush"]]'])
def test_what_is_no_key_in_a_file_is_refused_unseen(tmp_path: Path, value: str) -> None:
    file = tmp_path / "prelay.toml"
    file.write_text(f"api_key = {value}\n")
    with pytest.raises(BadUsage, match=r"^api_key in .* must") as refused:
        load({}, str(file))
    assert "hush" not in str(refused.value)


def test_an_empty_place_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_API_KEY", "hush,")
    with pytest.raises(BadUsage, match=r"^PRELAY_API_KEY key 2 must have 1 to 512 characters, not 0"):
        load({}, None)


def test_a_key_shows_in_no_representation() -> None:
    settings = load({"api_key": ["hush"]}, None)
    plan = Plan(settings, Path(), "m", Sizes(1, 1, 1), None, api_keys(settings))
    assert "hush" not in repr(settings)
    assert "hush" not in repr(plan)


def test_only_the_api_process_is_given_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_API_KEY", "hush")
    settings = load({"redis_url": "unix:///nowhere"}, None)
    plan = Plan(settings, Path(), "m", Sizes(1, 1, 1), None, api_keys(settings))
    for role in ("api", "prefill", "decode", "unified"):
        environment = plan.child(role, role, 1.0, 1).environment
        assert (environment.get("PRELAY_API_KEY") == "hush") == (role == "api")


def test_a_client_sends_the_first_of_its_keys() -> None:
    assert client_headers(None) == {}
    assert client_headers("k1,k2") == {"authorization": "Bearer k1"}
    with pytest.raises(BadUsage, match="--api-key must"):
        client_headers("k 1")
