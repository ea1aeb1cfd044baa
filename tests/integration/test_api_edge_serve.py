"""`prelay serve` with API keys, as a user starts it: ready all the same, and no key where others can read it."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from prelay.chat import Conversation, converse
from prelay.errors import CliError
from tests.integration.serve_process import Serve

KEYS = ("hush-command-line", "hush-second", "hush-environment", "hush-file")


@pytest.mark.parametrize("way", ["command line", "environment", "file"])
def test_a_key_is_wanted_by_the_api_and_seen_by_nobody_else(
    way: str, null_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("# one\nhush-file\n")
    ways: dict[str, tuple[list[str], dict[str, str], str]] = {
        "command line": (["--api-key", "hush-command-line", "--api-key=hush-second"], {}, "hush-second"),
        "environment": ([], {"PRELAY_API_KEY": "hush-environment,hush-second"}, "hush-environment"),
        "file": (["--api-key-file", str(file)], {}, "hush-file"),
    }
    arguments, variables, key = ways[way]
    words = ["--null-model", "--unified", "1", "--model", str(null_folder), "--served-model-name", "null"]
    serve = Serve(*words, *arguments, state=tmp_path / "state", port=None, **variables)
    try:
        serve.until_ready()
        assert httpx.get(f"{serve.url}/admin/workers").status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{serve.url}/admin/workers", headers=headers).status_code == 200
        processes = {"supervisor": psutil.Process(serve.process.pid), **serve.children()}
        assert {"api", "unified", "server"} <= set(processes)
        for name, process in processes.items():
            assert "hush" not in " ".join(process.cmdline()), name
            assert ("hush" in str(process.environ())) <= (name in ("api", "supervisor")), name
        assert "hush" not in serve.log
        assert 'Bearer $PRELAY_API_KEY"' in serve.log

        assert converse(Conversation(serve.url, max_tokens=3, api_key=f"{key},other"), "t1 t2") == 0
        assert capsys.readouterr().out.startswith(" t")
        with pytest.raises(CliError, match="no API key was sent"):
            converse(Conversation(serve.url), "t1")
        assert serve.stop() == 0
    finally:
        serve.close()
    assert not serve.leftovers()


def test_a_key_file_that_is_not_there_is_one_line_before_anything_starts(null_folder: Path, tmp_path: Path) -> None:
    words = ["--null-model", "--model", str(null_folder), "--api-key-file", "/nowhere/keys"]
    serve = Serve(*words, state=tmp_path / "state")
    try:
        assert serve.process.wait(60) == 2
        assert serve.log == "prelay: api_key_file /nowhere/keys cannot be read: No such file or directory\n"
        assert not (tmp_path / "state").exists()
    finally:
        serve.close()
