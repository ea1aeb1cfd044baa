"""What each check of `prelay doctor` says of what it is given: machine, configuration and server."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prelay.binaries import ServerBinary
from prelay.doctor import configuration, gpus, machine, server
from prelay.doctor.examine import JobsServer, Server
from prelay.doctor.facts import Binary, Facts, Model, Native, NothingToLookAt, Placement, Pools, Processor, Swept
from prelay.doctor.finding import Finding, State
from prelay.doctor.fleets import Fleet, Look, Looks
from prelay.doctor.gpus import Gpus, look_for_gpus
from prelay.doctor.places import Files, Port
from prelay.doctor.places import State as Place
from prelay.errors import BadUsage, TooSmall
from prelay.geometry import Geometry
from prelay.host import Host
from prelay.segments import Segments, look_at_segments
from prelay.settings import load
from prelay.sizing import Sizes
from prelay_engine.cpu import Cpu
from prelay_queue.keys import Keys
from prelay_queue.server import ServerInfo

GIB = 1 << 30
HOST = Host(16 * GIB, 8 * GIB, 4 * GIB, 8, False)
SIZES = Sizes(512, 256, 4)
ABOUT = ServerInfo("redis", "7.2.5", "master", "noeviction", 1 << 20, 2 * GIB, True, False)
SERVER = Server(
    "redis://q", ABOUT, {"aof_enabled": 1}, {"appendfsync": "everysec", "save": ""}, trips_ms=(0.1, 0.2, 9.0)
)


def about(**changes: Any) -> Server:
    return replace(SERVER, about=replace(ABOUT, **changes))


def says(finding: Finding, state: str, *words: str) -> None:
    assert finding.state == state, finding
    for part in words:
        assert part in f"{finding.found} → {finding.advice}"
    assert bool(finding.advice) or finding.state is not State.WARN, "a warning says what to do"


# --- the machine


def test_a_cpu_is_told_by_what_it_multiplies() -> None:
    plain, amx = (
        Cpu("GenuineIntel", frozenset({"avx2", "fpu"})),
        Cpu("GenuineIntel", frozenset({"amx_bf16", "avx512f"})),
    )
    says(machine.cpu(Processor(plain, HOST, "auto")), "ok", "8 core(s), avx2; no bfloat16", "--dtype auto is float32")
    says(machine.cpu(Processor(plain, HOST, "bfloat16")), "warn", "slower here than float32")
    fast = replace(HOST, has_bf16=True)
    says(machine.cpu(Processor(amx, fast, "bfloat16")), "ok", "amx_bf16 avx512f; multiplies bfloat16 in hardware")
    says(machine.cpu(Processor(Cpu(), HOST, "auto")), "ok", "no features known")


def test_without_a_gpu_it_says_that_the_cpu_is_used_and_with_one_that_it_is_not_used() -> None:
    says(machine.gpu(Gpus((), "no nvidia-smi on PATH")), "ok", "none (no nvidia-smi on PATH): workers run on the CPU")
    says(machine.gpu(Gpus(("H200, 143771 MiB, 575.1",))), "ok", "H200", "not used without --device cuda")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'A, 10 MiB, 1'; echo 'B, 20 MiB, 1'", Gpus(("A, 10 MiB, 1", "B, 20 MiB, 1"))),
        ("echo 'Failed to initialize NVML'; exit 9", Gpus((), "nvidia-smi: Failed to initialize NVML")),
        ("exit 6", Gpus((), "nvidia-smi: exit code 6")),
        ("exec sleep 60", Gpus((), "nvidia-smi does not answer within 0.2 s")),
    ],
)
def test_the_drivers_tool_is_asked_and_may_fail_or_hang(
    script: str, found: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "ANSWER_S", 0.2 if "sleep" in script else 10.0)
    assert look_for_gpus() == found


def test_memory_and_shm_are_compared_with_what_the_pools_take() -> None:
    pools = Pools(HOST, 6 * GIB, SIZES, decode=3 * GIB, prefill=GIB)
    says(machine.memory(pools), "ok", "8.0 GiB free of 16.0 GiB: decode pools of 512 blocks grow to 3.0 GiB in all")
    says(machine.shared_memory(pools), "ok", "4.0 GiB free of 6.0 GiB: prefill pools of 256 blocks take 1.0 GiB in all")
    says(machine.memory(replace(pools, decode=8 * GIB)), "warn", "a smaller --kv-blocks")


def test_kernels_are_native_where_there_is_a_compiler_and_torch_s_where_that_may_be() -> None:
    found = Native("auto", "none", compiler="/usr/bin/g++")
    says(
        machine.kernels(found), "ok", "native, to be compiled at the first start, in some ten seconds, by /usr/bin/g++"
    )
    says(machine.kernels(replace(found, is_compiled=True, quantization="w8a8")), "ok", "compiled by", "w8a8")
    says(machine.kernels(Native("torch", "none", problem="no compiler")), "ok", "torch computes, as --kernels says")
    none = Native("auto", "none", problem="there is no C++ compiler")
    says(machine.kernels(none), "warn", "there is no C++ compiler: torch computes", "apt install g++")
    came = replace(none, shipped="kernels-avx2-1.so", kernels="native")
    says(machine.kernels(came), "ok", "came with the package", "kernels-avx2-1.so", "since there is no C++ compiler")
    for wanted in (replace(none, kernels="native"), replace(none, quantization="w8a8")):
        says(machine.kernels(wanted), "fail", "there is no C++ compiler, and", "apt install g++")


def test_workers_and_their_threads_are_shown_with_what_few_cores_are_better_used_for() -> None:
    pair = Placement(1, 1, 0, threads=2, cores=2)
    says(machine.workers(pair), "ok", "1 prefill, 1 decode; 2 thread(s) each on 2 core(s)", "--unified 1 gives more")
    for other in (replace(pair, cores=32), Placement(0, 0, 1, threads=2, cores=2)):
        assert "--unified" not in machine.workers(other).found


def test_with_a_broken_model_memory_and_shm_are_still_shown() -> None:
    pools = Pools(HOST, 6 * GIB)
    untold = "what the pools take cannot be told: the model cannot be read"
    says(machine.memory(pools), "ok", f"8.0 GiB free of 16.0 GiB; {untold}")
    says(machine.shared_memory(pools), "ok", f"4.0 GiB free of 6.0 GiB; {untold}")


def test_too_small_a_memory_or_shm_fails_in_its_own_row() -> None:
    small = Pools(HOST, 64 << 20, problem=TooSmall("1 full context needs more", "/dev/shm"))
    says(machine.shared_memory(small), "fail", "of 64 MiB: 1 full context needs more", "--shm-size")
    says(machine.memory(small), "ok", "see /dev/shm")
    little = replace(small, problem=TooSmall("1 full context needs more", "memory"))
    says(machine.memory(little), "fail", "1 full context needs more")
    says(machine.shared_memory(little), "ok", "see memory")
    says(machine.memory(replace(small, problem=BadUsage("--max-model-len must be"))), "fail", "--max-model-len must be")


def test_no_shm_fails_unless_no_worker_needs_it() -> None:
    none = replace(HOST, shm_free=0)
    says(machine.shared_memory(Pools(none, 0)), "fail", "mount a tmpfs")
    says(machine.shared_memory(Pools(none, 0, SIZES)), "fail", "mount a tmpfs")
    says(machine.shared_memory(Pools(none, 0, Sizes(512, 0, 4))), "ok", "no prefill worker needs it")


def test_segments_of_the_living_the_dead_and_of_others_are_told_apart(tmp_path: Path) -> None:
    assert machine.segments(Swept(look_at_segments(tmp_path), ())).found == "0 in use (0 B), none left by dead workers"
    (tmp_path / "prelay-dead.kv").write_bytes(b"x" * 5000)
    (tmp_path / "prelay-link.kv").symlink_to(tmp_path / "prelay-dead.kv")
    os.mkfifo(tmp_path / "prelay-pipe.kv")
    (tmp_path / "other.kv").touch()
    with (tmp_path / "prelay-used.kv").open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        found = look_at_segments(tmp_path)
    assert (set(found.used), set(found.left)) == ({"prelay-used.kv"}, {"prelay-dead.kv"})
    assert set(found.closed) == {"prelay-link.kv", "prelay-pipe.kv"}
    assert found.left["prelay-dead.kv"] >= 5000
    finding = machine.segments(Swept(found, ()))
    says(finding, "warn", "1 left by dead workers (8 KiB): prelay-dead.kv", "prelay doctor --fix removes them")
    assert finding.items == ("prelay-dead.kv",)


def test_fix_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    for name in ("prelay-a.kv", "prelay-b.kv", "other.kv"):
        (tmp_path / name).touch()
    with (tmp_path / "prelay-used.kv").open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        facts = Facts(load({}, None), fix=False, shm=tmp_path)
        assert len(facts.segments().segments.left) == 2
        finding = machine.segments(Facts(load({}, None), fix=True, shm=tmp_path).segments())
    says(finding, "ok", "1 in use (0 B); removed 2 left by dead workers: prelay-a.kv, prelay-b.kv")
    assert {path.name for path in tmp_path.iterdir()} == {"other.kv", "prelay-used.kv"}


def test_the_room_of_segments_counts_as_the_next_start_and_a_running_one_will_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelay.doctor.facts.this_host", lambda: HOST)
    settings = load({"state_dir": str(tmp_path / "state")}, None)
    (tmp_path / "prelay-dead.kv").write_bytes(b"x" * 8192)
    with (tmp_path / "prelay-used.kv").open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(b"x" * 4096)
        owner.flush()
        assert Facts(settings, shm=tmp_path).host() == replace(
            HOST, shm_free=HOST.shm_free + 8192, memory_free=HOST.memory_free + 8192
        )
        (tmp_path / "state").mkdir()
        with (tmp_path / "state" / "lock").open("wb") as supervisor:
            fcntl.flock(supervisor, fcntl.LOCK_EX)
            assert Facts(settings, shm=tmp_path).host().shm_free == HOST.shm_free + 8192 + 4096


# --- the configuration


def test_a_model_shows_where_it_lies_and_how_long_it_can_be() -> None:
    says(configuration.model(Model(Path("/m"), Geometry(1, 1, 1, 8192))), "ok", "/m, context 8192 tokens")


def test_a_port_is_free_ours_another_prelays_or_somebody_elses() -> None:
    says(configuration.port(Port("h", 80)), "ok", "h:80 is free")
    says(configuration.port(Port("h", 80, "cannot listen")), "fail", "cannot listen")
    says(
        configuration.port(Port("h", 80, "cannot listen", "ready", True)), "ok", "the running prelay serve's, which is"
    )
    says(configuration.port(Port("h", 80, "cannot listen", "ready")), "warn", "a second one needs another --port")


def test_a_state_directory_is_free_in_use_orphaned_unfit_or_on_a_full_disk() -> None:
    place = Place(Path("/s"), True, exists=True, free=2 * GIB)
    says(configuration.state_directory(place), "ok", "/s, 2.0 GiB free, writable, nobody uses it")
    says(configuration.state_directory(replace(place, exists=False)), "ok", "/s (made at the first start)")
    says(configuration.state_directory(replace(place, holder="77")), "ok", "running prelay serve (pid 77)")
    says(configuration.state_directory(replace(place, server_held=True)), "warn", "a server without prelay serve")
    says(configuration.state_directory(replace(place, free=1 << 20)), "warn", "make room")
    says(configuration.state_directory(replace(place, problem="a file")), "fail", "a file", "another --state-dir")
    says(configuration.state_directory(replace(place, is_wanted=False)), "ok", "not used")


# --- the server


def test_a_server_program_is_only_needed_without_a_url() -> None:
    found = ServerBinary(Path("/usr/bin/redis-server"), "redis", (7, 0, 15))
    says(server.program(Binary(found, True)), "ok", "redis 7.0.15 (/usr/bin/redis-server)")
    says(server.program(Binary(found, False)), "ok", "not used")
    says(server.program(Binary(None, False)), "ok", "none needed")


def test_too_old_a_server_and_a_replica_fail() -> None:
    says(server.version(SERVER), "ok", "redis 7.2.5 (redis://q)")
    says(server.version(about(version="6.2.14")), "fail", "at least redis 7.0 is needed")
    says(server.version(about(kind="valkey", version="7.0.1")), "fail", "at least valkey 7.2 is needed")
    says(server.role(SERVER), "ok", "master")
    replica = replace(about(role="slave"), info={"master_host": "m", "master_port": 6379})
    says(server.role(replica), "fail", "slave of m:6379", "give the master's --redis-url")


def test_a_cluster_is_told_by_whether_this_fleets_keys_are_here() -> None:
    says(server.cluster(SERVER), "ok", "off")
    says(server.cluster(replace(SERVER, info={"cluster_enabled": 1})), "warn", "on; this fleet's keys are on this node")
    moved = replace(SERVER, info={"cluster_enabled": 1}, moved="10.0.0.2:6379")
    says(server.cluster(moved), "fail", "belong to 10.0.0.2:6379")
    says(server.scripts(moved), "fail", "see cluster mode")


def test_eviction_is_loud_and_fails_once_there_is_a_limit() -> None:
    says(server.eviction(SERVER), "ok", "noeviction")
    says(server.eviction(about(policy="allkeys-lru")), "fail", "CONFIG SET maxmemory-policy noeviction")
    says(server.eviction(about(policy="volatile-ttl", maxmemory=0)), "warn", "no maxmemory yet", "deletes jobs")


def test_a_nearly_full_server_is_warned_about() -> None:
    says(server.server_memory(SERVER), "ok", "1 MiB used of maxmemory 2.0 GiB")
    says(server.server_memory(about(used_memory=int(1.7 * GIB))), "warn", "raise maxmemory")
    says(server.server_memory(about(maxmemory=0)), "ok", "no maxmemory")


LOSSES: list[tuple[dict[str, object], dict[str, str], str, str]] = [
    ({"aof_enabled": 1}, {"appendfsync": "always", "save": ""}, "ok", "loses nothing that it acknowledged"),
    ({"aof_enabled": 1}, {"appendfsync": "everysec", "save": ""}, "ok", "loses the last second"),
    ({"aof_enabled": 1}, {"appendfsync": "no", "save": ""}, "ok", "half a minute"),
    ({"aof_enabled": 1}, {}, "ok", "it does not say"),
    ({"aof_enabled": 0, "rdb_changes_since_last_save": 7}, {"save": "3600 1"}, "warn", "since the last one: 7 changes"),
    ({"aof_enabled": 0}, {"save": ""}, "warn", "loses the whole queue"),
    ({"aof_enabled": 0}, {}, "warn", "may lose the whole queue"),
    ({"aof_enabled": 1, "aof_last_write_status": "err"}, {"save": ""}, "fail", "writes are refused"),
    ({"aof_enabled": 0, "rdb_last_bgsave_status": "err"}, {"save": "60 1"}, "fail", "the last snapshot failed"),
    ({"aof_enabled": 1, "rdb_last_bgsave_status": "err"}, {"save": "", "appendfsync": "no"}, "ok", "AOF"),
]


@pytest.mark.parametrize(("info", "config", "state", "words"), LOSSES, ids=[words for *_, words in LOSSES])
def test_persistence_says_what_a_crash_of_the_server_loses(
    info: dict[str, object], config: dict[str, str], state: str, words: str
) -> None:
    says(server.persistence(replace(SERVER, info=info, config=config)), state, words)


def test_scripts_that_do_not_run_fail_with_the_servers_words() -> None:
    says(server.scripts(SERVER), "ok", "EVALSHA runs them")
    says(
        server.scripts(replace(SERVER, scripts="NOPERM evalsha")), "fail", "NOPERM evalsha", "EVALSHA, EVAL and SCRIPT"
    )


def test_a_difference_of_clocks_is_shown_above_a_second_and_is_no_fault() -> None:
    says(server.clock(replace(SERVER, ahead_s=-0.4)), "ok", "agree within 1 s")
    says(server.clock(replace(SERVER, ahead_s=120.0)), "ok", "120.0 s ahead of this host's; no effect")
    says(server.clock(replace(SERVER, ahead_s=-2.5)), "ok", "2.5 s behind this host's; no effect")


def test_a_slow_round_trip_is_warned_about_and_one_slow_one_is_not() -> None:
    says(server.round_trip(SERVER), "ok", "median 0.20 ms, longest of 3 9.00 ms")
    says(server.round_trip(replace(SERVER, trips_ms=(6.0, 7.0, 8.0))), "warn", "nearer to the workers")


def test_the_fleets_of_a_server_are_listed_and_a_partial_look_is_said() -> None:
    look = Look((Fleet(Keys("a"), workers={"w"}), Fleet(Keys("b", 1))))
    both = "a.0: 0 open job(s), 1 live worker(s); b.1: 0 open job(s), 0 live worker(s)"
    says(server.fleets(replace(SERVER, looks=Looks(look, look))), "ok", both)
    part = replace(look, complete=False)
    says(server.fleets(replace(SERVER, looks=Looks(look, part))), "warn", "too many keys")
    says(server.fleets(replace(SERVER, no_looks="NOPERM scan")), "warn", "NOPERM scan", "allow SCAN")
    says(server.fleets(replace(SERVER, looks=Looks(Look(), Look()))), "ok", "none has used this server")


def test_a_segment_file_that_goes_while_it_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelay.segments.segment_files", lambda _: [tmp_path / "prelay-gone.kv"])
    assert look_at_segments(tmp_path) == Segments({}, {}, {})


def test_the_folder_of_batches_is_writable_and_has_room() -> None:
    root = Path("/files")
    says(configuration.files(Files(root, "", True, 9 * GIB)), "ok", "/files, 9.0 GiB free, writable")
    says(configuration.files(Files(root, "", False, 9 * GIB)), "ok", "made at the first start")
    says(configuration.files(Files(root, "", True, GIB // 2)), "warn", "make room")
    says(configuration.files(Files(root, "this user may not write /files")), "fail", "may not write", "--files-dir")


def test_the_server_of_batch_jobs_is_a_master_and_no_cluster() -> None:
    says(configuration.jobs_server(JobsServer("redis://jobs", ABOUT, False)), "ok", "redis 7.2.5 (redis://jobs)")
    says(configuration.jobs_server(JobsServer("redis://jobs", ABOUT, True)), "fail", "no cluster mode")
    replica = JobsServer("redis://jobs", replace(ABOUT, role="slave"), False)
    says(configuration.jobs_server(replica), "fail", "a slave", "master")


def test_without_batches_there_is_no_folder_to_look_at() -> None:
    with pytest.raises(NothingToLookAt):
        Facts(load({"batch": "0"}, None)).files()
    with pytest.raises(NothingToLookAt):
        Facts(load({"redis_url": "redis://q"}, None)).files()
    assert Facts(load({"redis_url": "redis://q", "files_dir": "/f"}, None)).files().root == Path("/f")
    assert Facts(load({"state_dir": "/s"}, None)).files().root == Path("/s/files")
    with pytest.raises(NothingToLookAt):
        Facts(load({}, None)).jobs_server()
