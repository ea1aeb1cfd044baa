"""Servers of the comparison: started one at a time, since all use all cores, and ended with everything they started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.bed.ports import free_port
from tests.bed.serving import AS_IT_IS, serving

START_S, STOP_S = 300.0, 60.0


@dataclass(frozen=True)
class Prelay:
    """`prelay serve` with these options."""

    name: str
    options: Sequence[str] = ()

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[str]:
        """Its URL, while it runs."""
        # Prompts are random, but the rounds repeat them.
        options = ("--served-model-name", "m", "--prefix-cache", "off", *self.options)
        with serving(*options, model=model, environment=AS_IT_IS) as found:
            yield found.url


@dataclass(frozen=True)
class Running:
    """One that somebody else has started."""

    name: str
    url: str

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[str]:  # noqa: ARG002 - it has its own
        yield self.url


@dataclass(frozen=True)
class Vllm:
    """vLLM for the CPU out of the environment that install_vllm made."""

    name: str
    folder: Path
    options: Sequence[str] = field(
        default=("--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching")
    )

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[str]:
        server = [str(self.folder / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        command = [*server, "--model", str(model), "--served-model-name", "m", *self.options]
        with _started(command, environment) as url:
            yield url


@dataclass(frozen=True)
class LlamaCpp:
    """A llama.cpp server, with as many threads as there are cores, and what the loads need of slots and context."""

    name: str
    binary: Path
    gguf: Path
    options: Sequence[str] = ("--parallel", "32", "--ctx-size", str(32 * 1152), "--cache-ram", "0", "--alias", "m")

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[str]:  # noqa: ARG002 - it reads its own format
        threads = str(len(os.sched_getaffinity(0)))
        with _started([str(self.binary), "--model", str(self.gguf), "--threads", threads, *self.options], {}) as url:
            yield url


Server = Prelay | Running | Vllm | LlamaCpp


@contextlib.contextmanager
def _started(command: Sequence[str], environment: dict[str, str]) -> Iterator[str]:
    """The URL of what `command` with a port of its own serves, while it runs; its home is a folder that goes again."""
    port, scratch = free_port(), tempfile.mkdtemp(prefix="peer-")
    environment = {"PATH": os.environ["PATH"], "HOME": scratch} | environment
    with (Path(scratch) / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        _until_ready(f"http://127.0.0.1:{port}", process, Path(scratch) / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"the server is not ready after {START_S:.0f} s:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            break
    with contextlib.suppress(ProcessLookupError):  # its own children
        os.killpg(process.pid, signal.SIGKILL)
