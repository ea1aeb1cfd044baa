"""docker-compose.yml, its images and what they are given, as Docker Compose and hadolint read them."""

from __future__ import annotations

import re
import stat
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prelay.cards import gpu_config
from prelay.options import API, BATCH_WORKER, DECODE, OPTIONS, PREFILL
from prelay.settings import Settings, load
from tests.bed.compose import ROOT, config, seconds, tool

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TAKES = {"api": API, "prefill": PREFILL, "decode": DECODE, "batch-worker": BATCH_WORKER}


@cache
def services() -> dict[str, dict[str, Any]]:
    """All services of all profiles."""
    found: dict[str, dict[str, Any]] = config("*")["services"]
    return {name: {key: value for key, value in spec.items() if value is not None} for name, spec in found.items()}


def ours() -> dict[str, dict[str, Any]]:
    """Those that run Prelay, and nothing that ends by itself."""
    return {
        name: spec
        for name, spec in services().items()
        if spec.get("command", [""])[0] == "prelay" and spec["command"][1] in TAKES
    }


def test_the_profile_of_env_is_a_fleet_without_gpus() -> None:
    (profile,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE)
    found = config(*profile.split(","))["services"]
    assert set(found) == {"redis", "model", "shm", "api", "batch", "prefill-cpu", "decode-cpu"}
    assert not [name for name, spec in found.items() if "deploy" in spec]
    assert set(services()) == {*found, "prefill", "decode", "prometheus", "grafana"}


def test_every_setting_is_one_that_its_command_takes() -> None:
    assert len(ours()) == 6
    for name, spec in ours().items():
        _, command, *rest = spec["command"]
        assert rest == []
        known = {OPTIONS[option].variable for option in TAKES[command]} | {"PRELAY_CACHE_DIR"}
        given = {variable for variable in spec["environment"] if variable.startswith("PRELAY_")}
        assert given - known == set(), name


def test_a_container_may_do_no_more_than_it_needs() -> None:
    for name, spec in services().items():
        uid = int(spec["user"].partition(":")[0])
        assert uid > 0, name
        assert spec["read_only"], name
        assert spec["cap_drop"] == ["ALL"], name
        assert spec["security_opt"] == ["no-new-privileges:true"], name
        for port in spec.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name


def test_secrets_are_files_and_stand_nowhere_else() -> None:
    for name, spec in services().items():
        words = [*spec.get("command", ()), *map(str, spec.get("environment", {}).values())]
        given = {f"/run/secrets/{secret['source']}" for secret in spec.get("secrets", ())}
        named = {found for word in words for found in re.findall(r"/run/secrets/\w+", word)}
        assert named <= given, name
        assert not [v for v in spec.get("environment", {}) if re.search(r"(PASSWORD|KEY)$", v)], name


def test_every_service_that_stays_has_a_health_check_and_ends_within_its_grace() -> None:
    for name, spec in services().items():
        if spec["restart"] == "unless-stopped" and name != "shm":
            assert spec["healthcheck"]["test"], name
            assert seconds(spec["healthcheck"]["start_period"]) >= 60, name
    api = services()["api"]
    told = Settings(drain_s=api["environment"]["PRELAY_DRAIN_S"])
    grace_s = float(api["environment"]["PRELAY_SHUTDOWN_GRACE_S"])
    assert seconds(api["stop_grace_period"]) > told.drain_s + grace_s
    for name, spec in ours().items():
        # the writer's 5 s, the step that it is in, and the batch worker's longest wait between two looks
        assert seconds(spec["stop_grace_period"]) >= 15, name


def test_workers_of_a_machine_share_shm_and_process_numbers_with_a_service_that_no_restart_of_theirs_touches() -> None:
    workers = {name: spec for name, spec in ours().items() if spec["command"][1] in ("prefill", "decode")}
    assert len(workers) == 4
    for spec in workers.values():
        assert (spec["ipc"], spec["pid"]) == ("service:shm", "service:shm")
    assert services()["shm"]["ipc"] == "shareable"
    assert int(services()["shm"]["shm_size"]) >= 1 << 30


def test_workers_on_gpus_see_all_of_them_and_compute_on_one() -> None:
    for name in ("prefill", "decode"):
        spec = services()[name]
        (device,) = spec["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        assert "CUDA_VISIBLE_DEVICES" not in spec["environment"]
        assert spec["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_workers_on_one_gpu_leave_each_other_their_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("prefill", "decode"):
        with monkeypatch.context() as environment:
            for variable, value in services()[name]["environment"].items():
                if not variable.endswith("_FILE"):
                    environment.setenv(variable, value)
            found[name] = gpu_config(load({}, None))
    prefill, decode = found.values()
    assert prefill is not None
    assert decode is not None
    assert prefill.device == decode.device == "cuda:0"
    assert prefill.memory_utilization < decode.memory_utilization
    assert prefill.memory_utilization + decode.memory_utilization <= 0.9


def test_triton_has_a_compiler_and_a_folder_from_which_what_it_makes_can_be_loaded() -> None:
    stage = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    (cuda,) = [text for text in stage if text.startswith("runtime AS cuda\n")]
    assert {"gcc", "libc6-dev"} <= set(cuda.split())
    assert re.findall(r"^USER (.*)$", cuda, re.MULTILINE)[-1] == "10001:10001"
    folders = dict(re.findall(r"(TRITON_CACHE_DIR|CUDA_CACHE_PATH)=(\S+)", cuda))
    assert len(folders) == 2
    for name in ("prefill", "decode"):
        writable = {m["target"] for m in services()[name]["volumes"] if not m.get("read_only")}
        # a tmpfs of Docker's is mounted noexec
        assert {str(Path(folder).parent) for folder in folders.values()} == writable, name
        assert writable.isdisjoint(services()[name]["tmpfs"])
    (owned,) = re.findall(r"install -d -o prelay -g prelay -m 0700 (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert "/kernels" in owned.split()


def test_redis_is_new_enough_keeps_what_it_has_and_throws_nothing_away() -> None:
    spec = services()["redis"]
    version = re.fullmatch(r"redis:(\d+)\.(\d+)\.\d+-bookworm", spec["image"])
    assert version is not None
    assert (int(version[1]), int(version[2])) >= (7, 2)
    settings = (ROOT / "deploy" / "redis.conf").read_text()
    for line in ("maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec", "dir /data"):
        assert f"\n{line}\n" in settings
    assert "--maxmemory 512mb" in spec["command"][-1]


def test_images_of_others_are_pinned_to_a_release() -> None:
    named = {spec["image"] for spec in services().values() if "build" not in spec}
    named |= set(re.findall(r"^FROM (\S+:\S+) AS", DOCKERFILE.read_text(), re.MULTILINE))
    assert len(named) == 4
    for image in named:
        assert re.search(r":v?\d+\.\d+\.\d+(-[a-z-]+)?$", image), image


def test_images_are_built_from_stages_that_there_are() -> None:
    stages = set(re.findall(r" AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    targets = {name: spec["build"]["target"] for name, spec in services().items() if "build" in spec}
    assert set(targets.values()) == {"api", "cpu", "cuda"} <= stages
    assert {name for name, target in targets.items() if target == "api"} == {"api", "batch", "shm"}


def test_the_build_gets_every_package_and_no_test() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    roots = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/prelay*/__init__.py")}
    assert roots <= kept
    copied = re.search(r"^COPY (pyproject.*) \./$", DOCKERFILE.read_text(), re.MULTILINE)
    assert copied is not None
    assert set(copied[1].split()) <= kept
    assert {"tests", "secrets", ".git"}.isdisjoint(kept)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_the_files_that_are_mounted_are_there() -> None:
    mounts = [m["source"] for s in services().values() for m in s.get("volumes", ()) if m["type"] == "bind"]
    assert len(mounts) == 5
    assert not [source for source in mounts if not Path(source).exists()]


def test_prometheus_asks_where_services_are() -> None:
    text = (ROOT / "deploy" / "prometheus.yml").read_text()
    targets = re.findall(r'targets: \["(\w+):(\d+)"\]', text)
    assert targets == [("api", services()["api"]["environment"]["PRELAY_PORT"])]
    assert "names: [workers]" in text
    for name, spec in ours().items():
        if name != "api":
            assert spec["networks"]["default"] == {"aliases": ["workers"]}
            assert f"port: {spec['environment']['PRELAY_METRICS_PORT']}\n" in text


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    done = subprocess.run(
        [tool("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_secrets_are_made_once_for_containers_and_for_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"

    def make() -> dict[str, str]:
        script = ROOT / "scripts" / "secrets.sh"
        subprocess.run([script], env={"PATH": "/usr/bin:/bin", "SECRETS_DIR": str(folder)}, check=True, timeout=60)
        return {file.name: file.read_text() for file in folder.iterdir()}

    first = make()
    assert set(first) == set(config()["secrets"]) | {"grafana_password"}
    assert all(re.fullmatch("[0-9a-f]{48}", secret) for secret in first.values())
    assert len(set(first.values())) == 3
    (folder / "api_key").unlink()
    again = make()
    assert {name for name in first if first[name] != again[name]} == {"api_key"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o444}


@pytest.mark.parametrize("extra", ["", "workers"])
def test_the_build_installs_what_the_project_wants(extra: str) -> None:
    command = ["python3", "deploy/docker/requirements.py", *([extra] if extra else [])]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout.splitlines()
    assert ("torch>=2.11" in said) == bool(extra)
    assert ("fastapi>=0.120" in said) != bool(extra)
