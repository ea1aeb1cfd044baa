"""A `prelay serve` with the null model in a folder of its own, for the time of a measurement."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ..errors import CliError
from ..options import OPTIONS
from ..pdeath import dying
from ..statedir import socket_path
from . import proc
from .process import environment

#: The null model's words; its tokenizer knows one more, the end.
WORDS = 1000
_CONTEXT = 1 << 17
_READY_S, _STOP_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Rig:
    """A running service: where it is, its private server's socket, and its processes by name."""

    url: str
    socket: Path
    pids: dict[str, int]


@contextmanager
def null_service(model: Path | None, step_ms: float, max_running: int) -> Iterator[Rig]:
    """Run it until the end of the block; nothing is left of it then. `model` lends its tokenizer.

    Raise CliError with its last words when it does not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="prelay-bench-") as name:
        folder = Path(name)
        port = _free_port()
        options = {
            "model": str(model or make_tokenizer(folder / "null")),
            "served_model_name": "null",
            "state_dir": str(folder / "state"),
            "port": str(port),
            "null_step_ms": str(step_ms),
            "kv_blocks": "65536",
            "prefill_kv_blocks": "65536",
            "max_running": str(max_running),
            "batch": "0",
        }
        words = [word for option, value in options.items() for word in (OPTIONS[option].flag, value)]
        with _started(["serve", "--null-model", *words], folder / "log") as process:
            url = f"http://127.0.0.1:{port}"
            _until_ready(url, process, folder / "log")
            yield Rig(url, socket_path(folder / "state"), _processes(process.pid))


def make_tokenizer(folder: Path) -> Path:
    """Write a model folder without a model: each id is one word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    end = "<end>"
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(WORDS)} | {end: WORDS}, unk_token="t0"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([end])
    backend.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": _CONTEXT, "vocab_size": WORDS + 1, "eos_token_id": WORDS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def _started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, so that Ctrl-C is ours; it is stopped in order, also when we die."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            dying(signal.SIGTERM, sys.executable, "-P", "-m", "prelay", *words),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children die with it
            process.wait()


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as client:
        while not _is_ready(client):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise CliError(f"the service did not get ready: {lines[-1] if lines else 'it said nothing'}")
            time.sleep(0.05)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def _processes(supervisor: int) -> dict[str, int]:
    """The supervisor's children by role; what is none of our commands is the server."""
    found = {"supervisor": supervisor}
    for pid, words in proc.children(supervisor):
        found[words[-1] if "prelay" in words else "server"] = pid
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
