"""docker-compose.yml as local processes: its commands, environment and health checks, at other places.

Where this machine allows it they have what `read_only` leaves them: their volumes, a /tmp, and /dev/shm.
Docker Compose itself says what the file means (`config`), so anchors, profiles and defaults are read as it reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from .ports import free_port
from .readonly import can_confine, confined
from .servers import die_with_parent

ROOT = Path(__file__).parents[2]
#: What a process here may know of its surroundings beside what the file says.
_KEPT = ("PATH", "PYTHONPATH", "LANG", "OMP_WAIT_POLICY")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def tool(name: str) -> str:
    """A developer's tool beside this Python, or on PATH. Without it the test is skipped, in CI it fails."""
    beside = Path(sys.executable).with_name(name)
    if found := str(beside) if beside.exists() else shutil.which(name):
        return found
    if os.environ.get("CI"):
        pytest.fail(f"no {name} here (make dev)")
    pytest.skip(f"no {name} here (make dev)")


def config(*profiles: str, secrets: Path | None = None) -> dict[str, Any]:
    """What Docker Compose makes of docker-compose.yml. The `$` of a shell is doubled in it."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    if secrets is not None:
        environment["SECRETS_DIR"] = str(secrets)
    flags = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [tool("docker-compose"), "--project-directory", str(ROOT), *flags, "config", "--format", "json"],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seconds(duration: str) -> float:
    """A duration as Compose writes it: 1m30s."""
    parts = re.findall(r"(\d+)(h|ms|m|s)", duration)
    assert "".join(map("".join, parts)) == duration, duration
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


@dataclass
class Service:
    """One service and its process."""

    name: str
    spec: dict[str, Any]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Service({self.name}, {self.process.poll() if self.process else 'not started'})"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def grace_s(self) -> float:
        return seconds(self.spec.get("stop_grace_period", "10s"))


class Composed:
    """The services of one profile. `start` them all, `stop` them in order; `port` says where a service listens."""

    def __init__(self, profile: str, secrets: Path, folder: Path) -> None:
        self._file = config(profile, secrets=secrets)
        self._folder = folder
        self._ports: dict[tuple[str, str], int] = {}
        (folder / "home").mkdir()
        self.services = {
            name: Service(name, spec, folder / f"{name}.log") for name, spec in self._file["services"].items()
        }

    def port(self, service: str, port: int) -> int:
        """The port here that stands for one in the container."""
        return self._ports.setdefault((service, str(port)), free_port())

    def volume(self, name: str) -> Path:
        """The folder here that stands for a volume."""
        path = self._folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self) -> None:
        """Start each service when those that it depends on are as it wants them, and wait until all are healthy."""
        for service in self._in_order():
            for other, wish in service.spec.get("depends_on", {}).items():
                self._await(self.services[other], wish["condition"])
            self._launch(service)
        for service in self.services.values():
            if "healthcheck" in service.spec:
                self._await(service, "service_healthy")

    def stop(self) -> dict[str, int]:
        """SIGTERM, the last first. Return the exit codes; a service that overstays its grace has -9."""
        last_first = reversed(self._in_order())
        return {service.name: self._stop(service) for service in last_first if service.runs}

    def close(self) -> None:
        for service in self.services.values():
            if service.process is not None and service.runs:
                service.process.send_signal(signal.SIGCONT)
        self.stop()

    def logs(self) -> str:
        return "\n".join(f"--- {s!r}\n{s.log.read_text()[-4000:]}" for s in self.services.values() if s.log.exists())

    def processes(self) -> list[psutil.Process]:
        """All that run now, children included."""
        found = []
        for service in self.services.values():
            if service.process is not None and service.runs:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(service.process.pid)
                    found += [process, *process.children(recursive=True)]
        return found

    def _in_order(self) -> list[Service]:
        done: dict[str, Service] = {}

        def visit(name: str) -> None:
            for other in self.services[name].spec.get("depends_on", {}):
                visit(other)
            done.setdefault(name, self.services[name])

        for name in self.services:
            visit(name)
        return list(done.values())

    def _await(self, service: Service, condition: str) -> None:
        assert service.process is not None
        if condition == "service_completed_successfully":
            assert service.process.wait(300) == 0, self.logs()
        elif condition == "service_healthy":
            deadline = time.monotonic() + seconds(service.spec["healthcheck"]["start_period"])
            while not self.is_healthy(service):
                assert service.process.poll() is None, self.logs()
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.2)
        else:
            assert condition == "service_started"

    def is_healthy(self, service: Service) -> bool:
        """Run its health check once."""
        check = service.spec["healthcheck"]
        kind, *words = check["test"]
        assert kind in ("CMD", "CMD-SHELL")
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        done = subprocess.run(
            self._command(service, command), env=self._environment(service), cwd=self._folder,
            capture_output=True, check=False, timeout=seconds(check["timeout"]),
        )  # fmt: skip
        return done.returncode == 0

    def _launch(self, service: Service) -> None:
        with service.log.open("wb") as log:
            service.process = subprocess.Popen(
                self._command(service, service.spec["command"]), env=self._environment(service), cwd=self._folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
            )  # fmt: skip

    def _stop(self, service: Service) -> int:
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        try:
            return service.process.wait(service.grace_s)
        except subprocess.TimeoutExpired:
            service.process.kill()
            return service.process.wait(10)

    # From the container's world to this one.

    def _command(self, service: Service, words: list[str]) -> list[str]:
        program, *rest = [self._here(service, word) for word in words]
        ours = {"prelay": [sys.executable, "-m", "prelay"], "python": [sys.executable]}
        command = [*ours.get(program, [program]), *rest]
        if not (service.spec.get("read_only") and can_confine()):
            return command
        mounts = service.spec.get("volumes", ())
        writable = [self.volume(m["source"]) for m in mounts if m["type"] == "volume" and not m.get("read_only")]
        return confined(command, self._tmp(service), writable)

    def _tmp(self, service: Service) -> Path:
        folder = self._folder / f"tmp-{service.name}"
        folder.mkdir(exist_ok=True)
        return folder

    def _environment(self, service: Service) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        told = service.spec.get("environment", {})
        kept |= {"HOME": str(self._folder / "home"), "TMPDIR": str(self._tmp(service))}
        return kept | {n: self._here(service, v) for n, v in told.items()}

    def _here(self, service: Service, text: str) -> str:
        """Hosts first: their ports are others' than the same number of our own."""
        text = text.replace("$$", "$").replace("0.0.0.0", "127.0.0.1")
        names = "|".join(map(re.escape, self.services))
        text = re.sub(rf"\b({names}):(\d+)", lambda m: f"127.0.0.1:{self.port(m[1], int(m[2]))}", text)
        for port in _ports_of(service):
            text = re.sub(rf"(?<!\d){port}(?!\d)", str(self.port(service.name, int(port))), text)
        return _with_paths(text, self._mounts(service))

    def _mounts(self, service: Service) -> dict[str, Path]:
        """Where what a container has mounted lies here."""
        mounts = service.spec.get("volumes", ())
        found = {mount["target"]: self.volume(mount["source"]) for mount in mounts if mount["type"] == "volume"}
        copies = {m["target"]: self._copy(Path(m["source"]), found) for m in mounts if m["type"] == "bind"}
        named = (secret["source"] for secret in service.spec.get("secrets", ()))
        return found | copies | {f"/run/secrets/{n}": Path(self._file["secrets"][n]["file"]) for n in named}

    def _copy(self, source: Path, volumes: dict[str, Path]) -> Path:
        """A file of settings names volumes, too."""
        copy = self._folder / source.name
        copy.write_text(_with_paths(source.read_text(), volumes))
        return copy


def _with_paths(text: str, places: dict[str, Path]) -> str:
    for target, local in sorted(places.items(), reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(target)}(?![\w.-])", str(local), text)
    return text


def _ports_of(service: Service) -> list[str]:
    """The ports that a service listens on, as its own settings say."""
    environment = service.spec.get("environment", {})
    named = [environment[name] for name in ("PRELAY_PORT", "PRELAY_METRICS_PORT") if name in environment]
    return named + re.findall(r"--port (\d+)", " ".join(service.spec.get("command", ())))


@contextlib.contextmanager
def composed(profile: str, secrets: Path, folder: Path) -> Iterator[Composed]:
    """All services of a profile, healthy. What they said is shown with a failure; nothing of them stays."""
    found = Composed(profile, secrets, folder)
    try:
        yield found
    except BaseException:
        print(found.logs())
        raise
    finally:
        found.close()
