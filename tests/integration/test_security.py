"""What may be seen and done by whom: users of Redis by role, TLS, and secrets that show nowhere."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
import redis

from prelay_worker.config import Role
from tests.bed import http
from tests.bed.ports import free_port
from tests.bed.processes import NULL, Fleet, until, until_ready
from tests.bed.servers import KINDS, Server, make_server
from tests.integration.serve_process import Serve

USERS = Path(__file__).parents[2] / "deploy" / "redis-users.conf"
ROLES = ("prelay-api", "prelay-worker", "prelay-batch", "prelay")


@contextlib.contextmanager
def guarded(kind: str, *options: str) -> Iterator[tuple[Server, str]]:
    """A server with the users of deploy/, and their password. The default user may nothing; `server.client` may all."""
    folder = Path(tempfile.mkdtemp(prefix="bed-"))
    password, root = f"pw-{secrets.token_hex(8)}", secrets.token_hex(8)
    users = USERS.read_text().replace("CHANGE-ME", password)
    (folder / "users.conf").write_text(f"{users}\nuser root on >{root} ~* &* +@all\nuser default off\n")
    server = make_server(kind, folder, "--include", str(folder / "users.conf"), *options)
    server.client.close()
    server.client = redis.Redis(unix_socket_path=str(server.socket), username="root", password=root, protocol=2)
    try:
        server.start()
        yield server, password
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=KINDS)
def guard(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    with guarded(request.param) as found:
        yield found


def denied(server: Server) -> list[tuple[str, ...]]:
    """Who was refused what, by the server's own account."""
    found: Any = server.client.acl_log()
    return [tuple(_text(entry[name]) for name in ("username", "reason", "object")) for entry in found]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Site(Fleet):
    """A fleet whose processes come as the user of their role."""

    def __init__(self, server: Server, password: str, model: Path) -> None:
        self._socket, self._password = server.socket, password
        super().__init__(server.settings(), model)

    def be(self, user: str) -> None:
        """Those that start from now on are this user."""
        self.queue = replace(self.queue, url=f"unix://{user}:{self._password}@{self._socket}")


@pytest.mark.slow
def test_each_role_can_do_all_its_work_with_its_own_user(
    guard: tuple[Server, str], null_folder: Path, tmp_path: Path
) -> None:
    site = Site(*guard, null_folder)
    try:
        site.be("prelay-worker")
        site.worker(Role.PREFILL)
        doomed = site.worker(Role.DECODE, null=replace(NULL, step_ms=5))
        site.be("prelay-batch")
        site.batch_worker(tmp_path)
        site.be("prelay-api")
        api = site.api(files_dir=tmp_path)
        until_ready(api.url)
        use(site, api.url, doomed)
        assert run_batch(api.url) == 3
    finally:
        site.close()
    assert denied(guard[0]) == []


def use(site: Site, url: str, doomed: Any) -> None:
    """A stream that outlives a preempt, a crash and a drain; the operator's looks."""
    body = {"model": "null", "prompt": "t1 t2", "max_tokens": 600, "stream": True, "ignore_eos": True}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        name, lines = answer.headers["x-request-id"], answer.iter_lines()
        next(lines)
        assert http.post(f"{url}/admin/jobs/{name}/preempt").status_code == 202
        site.be("prelay-worker")
        site.worker(Role.DECODE, null=replace(NULL, step_ms=2))
        for path in ("overview", "jobs", "workers", "dead", f"jobs/{name}"):
            assert http.get(f"{url}/admin/{path}").status_code == 200
        assert "prelay_redis_up 1" in http.get(f"{url}/metrics").text
        doomed.kill()
        read = "\n".join(lines)
    assert read.rstrip().endswith("data: [DONE]")
    assert '"error"' not in read
    assert http.get(f"{url}/v1/streams/{name}").status_code == 200


def run_batch(url: str) -> int:
    """A batch of three lines, and how many were answered."""
    one = {"method": "POST", "url": "/v1/completions", "body": {"model": "null", "prompt": "t1", "max_tokens": 3}}
    lines = b"\n".join(orjson.dumps({**one, "custom_id": str(number)}) for number in range(3))
    uploaded = http.post(f"{url}/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post(f"{url}/v1/batches", json=wanted).json()

    def look() -> Any:
        found = http.get(f"{url}/v1/batches/{batch['id']}").json()
        return found if found["status"] in ("completed", "failed") else None

    return int(until(look, 60)["request_counts"]["completed"])


@pytest.mark.parametrize("user", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "KEYS *", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN",
        "SAVE", "BGREWRITEAOF", "REPLICAOF NO ONE", "MONITOR", "ACL LIST", "CLIENT KILL ID 1",
        "SCRIPT FLUSH",
        "FUNCTION FLUSH", "SET other:key x", "GET other:key", "XREAD STREAMS other 0", "SUBSCRIBE other",
        "PUBLISH other x",
    ],
)  # fmt: skip
def test_no_role_can_see_other_keys_or_touch_the_server(guard: tuple[Server, str], user: str, command: str) -> None:
    server, password = guard
    with redis.Redis(unix_socket_path=str(server.socket), username=user, password=password, protocol=2) as client:
        with pytest.raises(redis.ResponseError, match=r"NOPERM|permission"):
            client.execute_command(*command.split())
        with pytest.raises(redis.ResponseError, match=r"ACL failure|can't access"):
            client.eval("return redis.call('GET', 'other:key')", 0)
    server.client.acl_log_reset()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this address, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.fail("no openssl here") if os.environ.get("CI") else pytest.skip("no openssl here")
    made, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


def command_lines() -> str:
    """What everybody on this machine can read of all processes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return "\n".join(found)


@pytest.mark.slow
def test_a_service_on_a_redis_with_tls_shows_no_secret_anywhere(null_folder: Path, tmp_path: Path) -> None:
    """User, password and API key are given on the command line, the worst place, and on a TLS connection."""
    made, secret = certificate(tmp_path)
    port, key, words = free_port(), f"sk-{secrets.token_hex(12)}", f"prompt{secrets.token_hex(4)}"
    tls = ("--tls-port", str(port), "--tls-cert-file", str(made), "--tls-key-file", str(secret))
    with guarded("redis", *tls, "--tls-ca-cert-file", str(made), "--tls-auth-clients", "no") as (server, password):
        url = f"rediss://prelay:{password}@127.0.0.1:{port}/0?ssl_ca_certs={made}"
        state = tmp_path / "state"
        serve = Serve(
            "--null-model", "--model", str(null_folder), "--redis-url", url, "--api-key", key, "--log-level", "debug",
            state=state,
        )  # fmt: skip
        try:
            serve.until_ready()
            body = {"model": null_folder.name, "prompt": f"{words} t2", "max_tokens": 5}
            headers = {"authorization": f"Bearer {key}"}
            answer = http.post(f"{serve.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            asked = subprocess.run(
                [sys.executable, "-m", "prelay", "jobs", "ls", "--url", serve.url],
                env={**os.environ, "PRELAY_API_KEY": key}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            shown = command_lines()
            assert "prelay" in shown
            workers = [each for role, each in serve.children().items() if role in ("prefill", "decode")]
            assert len(workers) == 2
            assert all(key not in str(worker.environ()) for worker in workers)
            assert serve.stop() == 0
            said = serve.log
        finally:
            serve.close()
        assert denied(server) == []
    kept = "".join(path.read_text(errors="replace") for path in state.rglob("*") if path.is_file())
    for place in (shown, said, asked.stdout, kept):
        assert password not in place
        assert key not in place
        assert words not in place
    assert re.search(r"server redis .* \(rediss://\*\*\*@127\.0\.0\.1", said)
