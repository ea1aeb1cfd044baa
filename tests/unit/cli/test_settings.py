"""One model for all settings: where they come from, and what a bad one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prelay.errors import BadUsage
from prelay.options import OPTIONS, SERVE
from prelay.settings import Settings, load, unknown_variables


def test_every_option_is_a_setting_and_every_setting_an_option() -> None:
    assert set(OPTIONS) == set(Settings.model_fields)
    # of a worker on its own: prelay serve shows the metrics of all at the API, and gives out GPUs
    assert set(OPTIONS) - set(SERVE) == {"metrics_port", "metrics_host", "gpu"}


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prelay.toml"
    assert load({}, None).port == 8000
    file.write_text("port = 1001\nprefill = 2\n")
    assert load({}, str(file)).port == 1001
    monkeypatch.setenv("PRELAY_PORT", "1002")
    assert load({}, str(file)).port == 1002
    assert load({"port": "1003"}, str(file)).port == 1003
    assert load({"port": "1003"}, str(file)).prefill == 2


def test_prelay_config_names_the_file_and_the_option_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, port in (("a", 1001), ("b", 1002)):
        (tmp_path / f"{name}.toml").write_text(f"port = {port}\n")
    monkeypatch.setenv("PRELAY_CONFIG", str(tmp_path / "a.toml"))
    assert load({}, None).port == 1001
    assert load({}, str(tmp_path / "b.toml")).port == 1002


def test_a_file_in_the_working_directory_is_not_read_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prelay.toml").write_text("port = 1001\n")
    monkeypatch.chdir(tmp_path)
    assert load({}, None).port == 8000


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_PORT", "")
    assert load({}, None).port == 8000


def test_unified_workers_replace_the_pair_unless_the_pair_is_asked_for() -> None:
    assert load({}, None).counts() == (1, 1, 0)
    assert load({"unified": "2"}, None).counts() == (0, 0, 2)
    assert load({"unified": "2", "decode": "1", "prefill": "3"}, None).counts() == (3, 1, 2)


def test_a_fleet_that_serves_nothing_is_refused_unless_others_may_work_elsewhere() -> None:
    with pytest.raises(BadUsage, match="--prefill 0 --decode 1"):
        load({"prefill": "0"}, None)
    assert load({"prefill": "0", "redis_url": "redis://queue:6379/0"}, None).counts() == (0, 1, 0)


BAD = [
    ({"port": "70000"}, "--port must be at most 65535, not 70000"),
    ({"port": "0"}, "--port must be at least 1, not 0"),
    ({"port": "eighty"}, "--port must be a whole number, not eighty"),
    ({"port": "80.5"}, "--port must be a whole number, not 80.5"),
    ({"prefill": "-1"}, "--prefill must be at least 0, not -1"),
    ({"kv_blocks": "0"}, "--kv-blocks must be at least 1, not 0"),
    ({"block_size": "24"}, "--block-size must be 1, 2, 4, 8, 16, 32 or 64, not 24"),
    ({"dtype": "fp8"}, "--dtype must be auto, float32 or bfloat16, not fp8"),
    ({"keep": "all"}, "--keep must be delivered or emitted, not all"),
    ({"log_level": "loud"}, "--log-level must be debug, info, warning or error, not loud"),
    ({"served_model_name": ""}, "--served-model-name must not be empty, not ''"),
    ({"null_step_ms": "nan"}, "--null-step-ms must be"),
    ({"redis_url": "queue:6379"}, "--redis-url must be redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH, not"),
    ({"redis_url": "redis://:6379"}, "--redis-url must be"),
    ({"redis_url": "redis://queue:port"}, "--redis-url must be"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_a_bad_value_is_one_line_with_option_limit_and_value(given: dict[str, str], words: str) -> None:
    with pytest.raises(BadUsage) as refused:
        load(given, None)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_bad_value_is_named_where_it_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("decode = 1000\n")
    with pytest.raises(BadUsage, match=re.escape(f"decode in {file} must be at most 256, not 1000")):
        load({}, str(file))
    monkeypatch.setenv("PRELAY_DECODE", "many")
    with pytest.raises(BadUsage, match="PRELAY_DECODE must be a whole number, not many"):
        load({}, str(file))


@pytest.mark.parametrize("value", ["true", "1.5", '"x"', "[1]", "1979-05-27"])
def test_a_port_of_another_type_in_the_file_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f"port = {value}\n")
    with pytest.raises(BadUsage, match=r"^port in .*fleet.toml must"):
        load({}, str(file))


def test_an_unknown_key_in_the_file_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("kv-blocks = 12\n")
    with pytest.raises(BadUsage, match=r"unknown key 'kv-blocks' \(did you mean kv_blocks\?\)"):
        load({}, str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nport = 1\ndecode = 2\n", ": write port, decode above all tables, without [serve]"),
        ("[serve]\nkv-blocks = 1\n", "; unknown in it: 'kv-blocks' (did you mean kv_blocks?)"),
        ("[serve]\nport = 1\nx = 2\n", ": write port above all tables, without [serve]; unknown in it: 'x'"),
        ("[serve]\n", ""),
    ],
)
def test_a_table_in_the_file_is_an_error_that_says_where_its_keys_belong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(BadUsage) as refused:
        load({}, str(file))
    assert str(refused.value) == f"{file}: [serve] is a table, and settings stand in none{words}"


def test_a_file_that_is_missing_or_no_toml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"cannot read .*none\.toml: No such file"):
        load({}, str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("port: 1\n")
    with pytest.raises(BadUsage, match="not valid TOML"):
        load({}, str(tmp_path / "bad.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadUsage, match="not valid TOML"):
        load({}, str(tmp_path / "bad.toml"))


def test_a_password_shows_neither_in_the_settings_nor_in_an_error() -> None:
    settings = load({"redis_url": "redis://:hush@queue:6379/0"}, None)
    assert "hush" not in repr(settings)
    assert settings.url == "redis://:hush@queue:6379/0"
    with pytest.raises(BadUsage) as refused:
        load({"redis_url": "http://user:hush@queue/0"}, None)
    assert "hush" not in str(refused.value)


def test_a_child_reads_back_what_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"redis_url": "redis://:hush@queue/0", "unified": "2", "null_model": True, "kv_blocks": "7"}
    given |= {"batch_redis_url": "redis://:hush@jobs/0", "batch": "3", "files_dir": "here"}
    first = load(given, None)
    for name, value in first.environment().items():
        monkeypatch.setenv(name, value)
    assert load({}, None).model_dump() == first.model_dump()


def test_the_jobs_of_batches_are_where_the_queue_is_unless_they_have_a_server_of_their_own() -> None:
    assert load({"redis_url": "redis://queue"}, None).jobs_url == "redis://queue"
    assert load({"redis_url": "redis://queue", "batch_redis_url": "redis://jobs"}, None).jobs_url == "redis://jobs"
    assert load({}, None).jobs_url is None


def test_misspelt_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRELAY_PROT", "PRELAY_PORT", "PRELAY_FAULTS", "PRELAY_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == ["PRELAY_PROT"]
