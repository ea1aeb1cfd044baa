"""What `prelay doctor` says of GPUs, with fake ones: the driver's tool, CUDA's runtime, installed parts, verdicts."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prelay.cards import places
from prelay.doctor import devices, gpus, machine, ongpus, toolchain
from prelay.doctor.ask import ask
from prelay.doctor.cuda import COMMAND, Cuda, Device, look_at_cuda
from prelay.doctor.facts import Facts, NothingToLookAt, Placement, Pools, Processor
from prelay.doctor.finding import Finding, Result
from prelay.doctor.gpus import Card, Gpus, look_at_cards
from prelay.doctor.ongpus import Namespaces, OnGpus, Pinned
from prelay.doctor.registry import run
from prelay.doctor.toolchain import TorchBuild, Triton, look_at_torch, look_at_triton
from prelay.errors import BadUsage
from prelay.host import Host
from prelay.settings import load
from prelay.sizing import Sizes
from prelay_engine.cpu import Cpu
from prelay_kv.cuda.paths import Facts as PathFacts
from prelay_kv.cuda.paths import ProbeResult
from tests.bed.cudart import FakeGpus, fake_gpus, library
from tests.unit.cli.test_doctor_checks import says

GIB = 1 << 30
HOST = Host(16 * GIB, 8 * GIB, 4 * GIB, 2, False)
UUIDS = ("GPU-11111111-0000", "GPU-22222222-0000")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi that does this on PATH."""

    def put(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return put


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setenv("PRELAY_CUDART", str(library()))
    with fake_gpus(folder) as found:
        yield found


# --- programs that may hang


def test_a_program_that_hangs_is_ended_with_its_children_and_what_it_said_counts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    said = ask(("sh", "-c", f"sleep 600 > {tmp_path}/pipe & echo started; wait"), limit_s=0.3)
    assert (said.code, said.output) == (None, "started\n")
    gone = select.poll()
    gone.register(reader, select.POLLHUP)
    assert gone.poll(30_000) == [(reader, select.POLLHUP)], "the child has let go of the pipe"
    os.close(reader)


def test_a_program_whose_child_keeps_its_output_open_is_not_waited_for() -> None:
    begun = time.monotonic()
    said = ask(("sh", "-c", "sleep 2 & echo done; echo why >&2"), limit_s=30)
    assert (said.code, said.output, said.last_words()) == (0, "done\n", "why")
    assert time.monotonic() - begun < 2


def test_a_program_that_dies_is_told_by_its_signal() -> None:
    assert ask(("sh", "-c", "kill -9 $$"), limit_s=30).code == -9


# --- the driver's tool


LINE = "NVIDIA H200, 143771 MiB, 143000 MiB, 580.65.06, GPU-11111111-0000, {}, {}, {}, 9.0"


def test_a_card_is_read_with_its_modes(tool: Callable[[str], None]) -> None:
    tool(f"echo '{LINE.format('Disabled', 'Default', 'Enabled')}'; "
         f"echo '{LINE.format('Enabled', 'Exclusive_Process', 'Disabled')}'")  # fmt: skip
    found = look_at_cards()
    plain = Card("NVIDIA H200", UUIDS[0], 143000 << 20, 143771 << 20, "580.65.06", capability=(9, 0))
    odd = replace(plain, has_mig=True, compute_mode="Exclusive_Process", is_persistent=False)
    assert found.cards == (plain, odd)
    assert found.lines == ("NVIDIA H200, 143771 MiB, 580.65.06",) * 2
    assert found.is_wanted


def test_a_card_that_does_not_tell_everything_is_read_all_the_same(tool: Callable[[str], None]) -> None:
    tool("echo 'GB10, [N/A], [N/A], 580.1, GPU-1, [N/A], Default, [N/A], 12.1'")
    assert look_at_cards().cards == (Card("GB10", "GPU-1", driver="580.1", capability=(12, 1)),)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'No devices were found'; exit 6", "nvidia-smi: No devices were found"),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'", "another answer than was asked for"),
        ("sleep 600", "nvidia-smi does not answer within 0.2 s"),
        ("kill -9 $$", "nvidia-smi: exit code -9"),
    ],
)
def test_the_tool_may_refuse_hang_or_die(
    script: str, why: str, tool: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(script)
    monkeypatch.setattr(gpus, "ANSWER_S", 0.2 if "sleep" in script else 10.0)
    found = look_at_cards()
    assert (found.lines, found.cards) == ((), ())
    assert why in found.why


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_that_says_what_to_do() -> None:
    none = Gpus((), "no nvidia-smi on PATH", is_wanted=True)
    says(machine.gpu(none), "fail", "none (no nvidia-smi on PATH)", "--device cuda wants one", "--gpus all")
    says(machine.gpu(replace(none, seen=2)), "warn", "though CUDA sees 2", "NVIDIA_DRIVER_CAPABILITIES")
    says(machine.gpu(replace(none, lines=("H200",), seen=1)), "ok", "H200")


# --- CUDA's runtime, by a child


def test_a_child_tells_what_the_runtime_sees(fake: FakeGpus) -> None:
    fake.set(devices=3, no_p2p="1-2")
    found = look_at_cuda({0, 1, 2}, {(1, 0), (2, 1)}, {0})
    assert found.library == str(library())
    assert [device.total for device in found.devices] == [GIB] * 3
    assert [device.uuid for device in found.devices] == [fake.runtime.device_uuid(number) for number in range(3)]
    assert found.reaches == {(1, 0): True, (2, 1): False}
    assert found.facts == {0: PathFacts(probe=ProbeResult(True))}
    assert found.problem == ""


def test_only_what_is_asked_for_and_there_is_looked_at(fake: FakeGpus) -> None:
    fake.set(devices=2)
    found = look_at_cuda({1, 7}, {(7, 1), (1, 0)}, {7})
    assert [device.total for device in found.devices] == [0, GIB]
    assert (found.reaches, found.facts, found.problem) == ({(1, 0): True}, {}, "")


@pytest.mark.parametrize(("call", "code"), [("cudaGetDeviceCount", 35), ("cudaGetDeviceProperties", 999)])
def test_a_driver_that_refuses_is_told_in_its_words_with_what_to_do(fake: FakeGpus, call: str, code: int) -> None:
    fake.set(fail=f"{call}={code}")
    found = look_at_cuda({0}, (), {0})
    assert (found.devices, found.code) == ((), code)
    assert found.problem.startswith(f"{call}: ")
    says(devices.runtime(OnGpus({}, found)), "fail", str(library()), call, devices._ADVICE[code])


def test_a_device_that_refuses_is_told_apart_from_the_others(fake: FakeGpus) -> None:
    fake.set(devices=2, fail="cudaMemGetInfo=46")
    found = look_at_cuda({1}, (), {1})
    assert found.devices[1].code == 46
    assert (found.devices[0].problem, found.facts, found.problem) == ("", {}, "")
    says(
        devices.cards(on("--decode-gpus 1 --prefill 0 --decode 1", found)), "fail", "GPU 1 cannot be used", "-c DEFAULT"
    )


def test_a_machine_without_any_gpu_says_so(fake: FakeGpus) -> None:
    fake.set(devices=0)
    found = look_at_cuda({0}, (), {0})
    assert (found.devices, found.problem) == ((), "")
    says(devices.runtime(OnGpus({}, found)), "fail", "sees no GPU", "CUDA_VISIBLE_DEVICES", "--gpus all")


def test_the_runtime_is_torch_s_own_as_it_is_in_a_worker(
    fake: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that the linker knows, which may be for another driver."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('nobody imports this')")
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    shutil.copy(library(), lib / "libcudart.so.13")
    (lib / "libcudart.so.12").write_text("no library")
    monkeypatch.delenv("PRELAY_CUDART")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = look_at_cuda({0}, (), ())
    assert (found.library, len(found.devices)) == (str(lib / "libcudart.so.13"), 1)


def test_a_card_that_a_running_fleet_has_filled_is_no_fault(
    fake: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.set(fail="cudaMemGetInfo=2")
    given = {"device": "cuda", "state_dir": str(tmp_path / "state")}
    _, rows = all_rows(monkeypatch, **given)
    says(rows["cards"], "fail", "(2)", "nvidia-smi shows who")
    assert {"shares", "KV path"} <= set(rows)
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / "lock").open("wb") as supervisor:
        fcntl.flock(supervisor, fcntl.LOCK_EX)
        _, rows = all_rows(monkeypatch, **given)
    says(rows["cards"], "warn", "the running prelay serve has all of it")
    assert {"shares", "KV path"}.isdisjoint(rows)


def test_a_runtime_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_CUDART", "/nowhere/libcudart.so")
    found = look_at_cuda({0}, (), {0})
    says(devices.runtime(OnGpus({}, found)), "fail", "PRELAY_CUDART=/nowhere/libcudart.so", "install a torch with CUDA")


def test_memory_that_another_process_cannot_read_is_found_out(fake: FakeGpus) -> None:
    fake.set(fail="cudaIpcOpenMemHandle=217")
    probe = look_at_cuda({0}, (), {0}).facts[0].probe
    assert probe is not None
    assert (probe.ok, probe.code) == (False, 217)


def child(code: str) -> tuple[str, ...]:
    """In place of the look: a driver that does this after the devices were told."""
    told = [{"library": "/lib/cudart"}, {"uuids": UUIDS}, {"device": 0, "free": 1, "total": 2}]
    lines = "".join(f"print({json.dumps(fact)!r}, flush=True); " for fact in told)
    return (sys.executable, "-c", f"import os, time; {lines}{code}")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("time.sleep(600)", "the driver does not answer within 1 s"),
        ("os.kill(os.getpid(), 11)", "the process that asked the driver was ended by SIGSEGV"),
        ("raise OSError('no context')", "the process that asked the driver failed: OSError: no context"),
    ],
)
def test_a_driver_that_hangs_or_kills_is_survived_and_what_was_told_before_is_kept(code: str, problem: str) -> None:
    found = look_at_cuda({0}, (), {0}, command=child(code), limit_s=1)
    assert found.problem == problem
    assert found.devices == (Device(UUIDS[0], 1, 2), Device(UUIDS[1]))
    assert found.library == "/lib/cudart"


def test_what_a_driver_prints_in_between_is_no_fact() -> None:
    found = look_at_cuda((), (), (), command=child("print('NVRM: hello')"))
    assert (len(found.devices), found.problem) == (2, "")


@pytest.mark.parametrize("answer", ["{", "{}", '{"device": 9, "free": 1}', '{"facts": {}, "device": 0}'])
def test_an_answer_that_makes_no_sense_is_a_problem_and_no_crash(answer: str) -> None:
    found = look_at_cuda((), (), (), command=child(f"print({answer!r})"))
    assert "gave nonsense" in found.problem


def test_a_child_that_does_not_start_is_a_problem_and_no_crash() -> None:
    assert "/nowhere cannot be started: No such file" in look_at_cuda((), (), (), command=("/nowhere",)).problem


def test_the_child_imports_no_torch() -> None:
    code = "import sys, prelay.gpulook; print([m for m in ('torch', 'numpy', 'pydantic', 'redis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
    assert COMMAND[-1] == "prelay.gpulook"


# --- what is installed


def installed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchBuild:
    (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec if name == "torch" else None)
    return look_at_torch()


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ('cuda = "12.8"\n', "12.8"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", ""),
        ("cuda_home = '/usr'\nhip = '6'\n", None),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_own_file(
    text: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed(text, tmp_path, monkeypatch).cuda == cuda


def test_a_torch_without_its_file_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda _: SimpleNamespace(origin="/nowhere/torch/__init__.py"))
    assert look_at_torch().cuda is None


def test_only_a_torch_with_cuda_will_do() -> None:
    says(devices.torch(TorchBuild("2.13.0", "13.0")), "ok", "2.13.0 for CUDA 13.0")
    says(devices.torch(TorchBuild("2.13.0+cpu", "")), "fail", "built without CUDA", "install a build with it")
    says(devices.torch(TorchBuild("2.13.0", None)), "warn", "do not say")


def test_triton_s_compiler_headers_and_cache_are_looked_for_where_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = look_at_triton()
    assert (found.compiler, found.cache, found.problem) == (str(tmp_path / "gcc"), tmp_path / "cache", "")
    monkeypatch.setenv("CC", str(tmp_path / "another"))
    assert look_at_triton().compiler == ""
    (tmp_path / "cache").touch()
    assert "is not a directory" in look_at_triton().problem
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    assert look_at_triton().cache == tmp_path / "home" / ".triton" / "cache"


def test_a_folder_from_which_no_program_can_be_loaded_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    assert look_at_triton().problem == f"{tmp_path} is mounted noexec"


def test_what_triton_lacks_is_said_with_what_to_install() -> None:
    found = Triton("3.7.1", "/usr/bin/gcc", Path("/include"), True, Path("/kernels"))
    says(devices.triton(found), "ok", "3.7.1, compiles with /usr/bin/gcc, keeps kernels in /kernels")
    says(devices.triton(replace(found, compiler="")), "fail", "no C compiler", "apt install gcc")
    says(devices.triton(replace(found, has_headers=False)), "fail", "no Python.h in /include", "python3-dev")
    says(devices.triton(replace(found, problem="noexec")), "fail", "cannot be kept in /kernels", "TRITON_CACHE_DIR")


# --- verdicts


CUDA = Cuda("/lib/cudart", tuple(Device(uuid, 138 * GIB, 140 * GIB) for uuid in UUIDS))
CARD = Card("H200", UUIDS[0], 138 * GIB, 140 * GIB, "580.65", capability=(9, 0))
SHARED = PathFacts(probe=ProbeResult(True))


def on(options: str = "", cuda: Cuda = CUDA, **changes: Any) -> OnGpus:
    """The workers of these options on these GPUs."""
    words = options.replace("--", "").replace("-", "_").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    settings = load({"device": "cuda", "redis_url": "redis://q", **given}, None)
    return OnGpus(places(settings), cuda, **{"cards": {CARD.uuid: CARD}, "transport": settings.kv_transport} | changes)


def knowing(**changes: Any) -> Cuda:
    return replace(CUDA, **changes)


def test_a_card_is_shown_with_what_it_is_and_what_is_free() -> None:
    says(devices.runtime(on()), "ok", "/lib/cudart, sees 2 GPU(s)")
    says(devices.cards(on()), "ok", "0: H200, GPU-11111111, 138.0 GiB of 140.0 GiB free")
    both = devices.cards(on("--decode-gpus 1"))
    says(both, "ok", "1: GPU-22222222, 138.0 GiB")
    assert len(both.items) == 2
    odd = {CARD.uuid: replace(CARD, is_persistent=False, has_mig=True)}
    says(devices.cards(on(cards=odd)), "ok", "persistence mode off", "cut into slices (MIG)")


def test_a_card_that_is_not_there_fails_with_how_many_there_are() -> None:
    says(devices.cards(on("--decode-gpus 1,2 --decode 2")), "fail", "there is no GPU 2: CUDA sees 2", "--decode-gpus")


def test_modes_in_which_a_card_does_not_compute_for_its_workers_fail() -> None:
    alone = {CARD.uuid: replace(CARD, compute_mode="Exclusive_Process")}
    says(devices.cards(on(cards=alone)), "fail", "GPU 0 is for one process", f"nvidia-smi -i {CARD.uuid} -c DEFAULT")
    says(devices.cards(on("--decode-gpus 1", cards=alone)), "ok")
    closed = {CARD.uuid: replace(CARD, compute_mode="Prohibited")}
    says(devices.cards(on("--decode-gpus 1", cards=closed)), "fail", "GPU 0 computes for nobody", "-c DEFAULT")


def test_a_card_older_than_bfloat16_is_warned_about_unless_it_is_not_asked_for() -> None:
    old = {CARD.uuid: replace(CARD, capability=(7, 5))}
    says(devices.cards(on(cards=old)), "warn", "older than Ampere", "--dtype float32")
    says(devices.cards(on(cards=old, dtype="float32")), "ok")


def test_a_card_of_which_the_driver_had_no_time_to_tell_fails_with_why() -> None:
    hung = knowing(devices=tuple(Device(uuid) for uuid in UUIDS), problem="the driver does not answer within 15 s")
    says(devices.cards(on(cuda=hung)), "fail", "nothing is known of GPU 0: the driver does not answer within 15 s")
    says(devices.shares(on(cuda=hung)), "fail", "nothing is known")


def test_the_share_of_each_worker_is_shown_and_must_be_free() -> None:
    says(devices.shares(on()), "ok", "GPU 0: prefill-0 32% (44.1 GiB), decode-0 59% (81.9 GiB)")
    says(devices.shares(on("--decode-gpus 1")), "ok", "GPU 0: prefill-0 90%", "GPU 1: decode-0 90% (126.0 GiB)")
    full = knowing(devices=(Device(UUIDS[0], 20 * GIB, 140 * GIB), CUDA.devices[1]))
    says(devices.shares(on(cuda=full)), "warn", "of GPU 0 20.0 GiB are free", "--gpu-memory-utilization")
    says(devices.shares(on(cuda=full, is_running=True)), "ok")


def test_each_decode_worker_s_card_must_reach_that_of_each_prefill_worker() -> None:
    apart = on("--decode-gpus 1", knowing(reaches={(1, 0): False}))
    says(devices.peer_access(apart), "warn", "none for 1 → 0", "NVLink")
    says(devices.peer_access(on("--decode-gpus 1", knowing(reaches={(1, 0): True}))), "ok", "GPUs 1 reach 0")
    hung = on("--decode-gpus 1", knowing(problem="no answer"))
    says(devices.peer_access(hung), "fail", "it cannot be told: no answer")


def test_a_card_needs_no_access_to_itself() -> None:
    """CUDA says that it has none."""
    assert on().pairs == []
    assert on("--decode 3 --decode-gpus 0,1,2 --prefill 2 --prefill-gpus 0,1").pairs == [(0, 1), (1, 0), (2, 0), (2, 1)]


def test_the_path_of_kv_is_shown_with_its_reason() -> None:
    says(devices.kv_path(on(cuda=knowing(facts={0: SHARED}))), "ok", "GPU 0: cuda_ipc, another process could read")
    says(devices.kv_path(on("--kv-transport pinned")), "ok", "pinned, it was asked for")
    refused = knowing(facts={0: PathFacts(probe=ProbeResult(False, "cudaIpcOpenMemHandle: no (304)", 304))})
    says(devices.kv_path(on(cuda=refused)), "warn", "pinned, another process could not read", "(304)", "seccomp")
    says(devices.kv_path(on("--kv-transport cuda_ipc", refused)), "fail", "will hardly work", "--kv-transport auto")
    slices = knowing(facts={0: PathFacts(mig=True)})
    says(devices.kv_path(on(cuda=slices)), "warn", "pinned, a slice of a card")
    says(devices.kv_path(on(cuda=knowing(problem="the driver hangs"))), "fail", "for GPU 0: the driver hangs")


def test_cards_on_which_nobody_decodes_need_no_access_where_cuda_ipc_is_asked_for() -> None:
    other = {0: replace(SHARED, without_peer_access=(1,))}
    asked = "--kv-transport cuda_ipc"
    says(devices.kv_path(on(asked, knowing(facts=other))), "ok", "cuda_ipc, it was asked for")
    apart = knowing(facts=other, reaches={(1, 0): False})
    says(devices.kv_path(on(f"{asked} --decode-gpus 1", apart)), "fail", "no peer-to-peer access to this device from 1")


def test_cards_that_take_one_path_for_one_reason_are_one_line() -> None:
    found = devices.kv_path(on("--prefill 2 --prefill-gpus 0,1", knowing(facts={0: SHARED, 1: SHARED})))
    assert len(found.items) == 1
    says(found, "ok", "GPU 0, 1: cuda_ipc")


def test_the_pinned_path_needs_room_in_shm() -> None:
    pinned = Pinned(workers=2, free=4 * GIB, asked=0, context=GIB, most=3 * GIB, block=GIB // 64)
    says(devices.shared_memory(pinned), "ok", "4.0 GiB free, pools of 2 prefill worker(s) take up to 3.0 GiB")
    says(devices.shared_memory(replace(pinned, most=8 * GIB)), "warn", "--shm-size", "--prefill-kv-blocks 128")
    says(devices.shared_memory(replace(pinned, context=3 * GIB)), "fail", "at least 6.0 GiB", "--max-model-len")
    says(devices.shared_memory(replace(pinned, asked=2 * GIB)), "ok", "take 4.0 GiB")
    says(devices.shared_memory(replace(pinned, asked=3 * GIB)), "fail", "take 6.0 GiB", "--prefill-kv-blocks 128")


def test_namespaces_of_a_container_are_shown_with_what_others_must_share(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Namespaces(("process numbers", "/dev/shm"))
    says(devices.namespaces(both), "ok", "process numbers and /dev/shm", "must share both", "--pid and --ipc")
    says(devices.namespaces(Namespaces(("/dev/shm",))), "ok", "must share it")
    monkeypatch.setattr(ongpus, "_namespace", lambda kind: {"pid": "pid:[4026532222]"}.get(kind, ongpus._FIRST[kind]))
    assert ongpus.own_namespaces() == ("process numbers",)
    elsewhere = load({"device": "cuda", "redis_url": "redis://q"}, None)
    assert Facts(elsewhere).namespaces() == Namespaces(("process numbers",))
    with pytest.raises(NothingToLookAt):
        Facts(load({"device": "cuda"}, None)).namespaces()


def test_rows_about_the_host_say_nothing_of_kernels_and_pools_that_are_not_there() -> None:
    says(machine.cpu(Processor(Cpu(), HOST, "auto", computes=False)), "ok", "2 core(s), no features known")
    pools = Pools(HOST, 6 * GIB, Sizes(0, 0, 1), on_gpus=True)
    says(machine.memory(pools), "ok", "8.0 GiB free of 16.0 GiB; KV lies on the GPUs")
    says(machine.shared_memory(pools), "ok", "4.0 GiB free of 6.0 GiB; KV lies on the GPUs")
    assert "--unified" not in machine.workers(Placement(1, 1, 0, 1, 2, on_gpus=True)).found
    with pytest.raises(NothingToLookAt):
        Facts(load({"device": "cuda"}, None)).native()


# --- from settings to rows


def all_rows(
    monkeypatch: pytest.MonkeyPatch, look: Any = look_at_cuda, **given: object
) -> tuple[Result, dict[str, Finding]]:
    monkeypatch.setattr("prelay.doctor.facts.look_at_cuda", look)
    found = run((devices.checks,), Facts(load({"batch": "0", "model": "/nowhere", **given}, None)))
    return found, {row.name: row.finding for row in found.rows}


def test_without_device_cuda_no_driver_is_asked_and_no_row_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_look(*_: object) -> Cuda:
        raise AssertionError("nobody asked for GPUs")

    for given in ({}, {"device": "cuda", "null_model": True}):
        assert all_rows(monkeypatch, no_look, **given)[1] == {}


def test_all_of_it_with_two_fake_gpus(fake: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set(devices=2)
    _, rows = all_rows(monkeypatch, device="cuda", decode_gpus="1")
    assert [*rows] == ["torch", "Triton", "CUDA runtime", "cards", "shares", "peer access", "KV path"]
    for name in ("CUDA runtime", "cards", "shares", "peer access", "KV path"):
        says(rows[name], "ok")


def test_without_any_gpu_the_runtime_s_row_says_it_and_no_other(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.set(devices=0)
    _, rows = all_rows(monkeypatch, device="cuda")
    assert [*rows] == ["torch", "Triton", "CUDA runtime"]
    says(rows["CUDA runtime"], "fail")


def test_a_driver_that_hangs_holds_the_whole_look_up_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = partial(look_at_cuda, command=child("time.sleep(600)"), limit_s=1)
    begun = time.monotonic()
    _, rows = all_rows(monkeypatch, hangs, device="cuda", decode_gpus="1")
    assert time.monotonic() - begun < 10
    says(rows["CUDA runtime"], "ok")
    for name in ("cards", "peer access", "KV path"):
        says(rows[name], "fail", "the driver does not answer within 1 s")


def test_a_gpu_that_is_not_there_is_one_row_s_failure(fake: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = all_rows(monkeypatch, device="cuda", decode_gpus="1")
    assert [name for name, finding in rows.items() if finding.state == "fail" and name != "torch"] == ["cards"]
    assert "KV path" not in rows


def test_what_contradicts_the_device_is_said_in_the_row_of_torch(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rows = all_rows(monkeypatch, device="cuda", quantization="w8a8")
    says(rows["torch"], "fail", "--quantization must be none")
    assert "Triton" not in rows

    def refuse(_: object) -> None:
        raise BadUsage("triton is not installed")

    monkeypatch.setattr("prelay.doctor.facts.check_device", refuse)
    says(all_rows(monkeypatch, device="cuda")[1]["torch"], "fail", "triton is not installed", "pip install")


def test_the_row_of_gpus_counts_those_that_cuda_sees(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake.set(devices=2)
    found = Facts(load({"device": "cuda"}, None)).gpus()
    assert (found.why, found.seen, found.is_wanted) == ("no nvidia-smi on PATH", 2, True)


def test_pools_on_the_pinned_path_are_counted_in_the_model_s_blocks(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "hidden_size": 512,
              "max_position_embeddings": 1000}  # fmt: skip
    for name, text in (("config.json", json.dumps(config)), ("tokenizer.json", "{}"), ("m.safetensors", "")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("prelay.doctor.facts.this_host", lambda: HOST)
    given = {"device": "cuda", "model": str(tmp_path), "state_dir": str(tmp_path), "prefill": 2, "prefill_kv_blocks": 9}
    found = Facts(load({**given, "kv_transport": "pinned"}, None), shm=tmp_path).pinned()
    block = 2 * 4 * 2 * 64 * 2 * 16
    assert (found.workers, found.block, found.asked, found.context) == (2, block, 9 * block, 63 * block)
    assert found.most == pytest.approx(0.9 * 0.35 * GIB, rel=0.001)
    with pytest.raises(NothingToLookAt):
        Facts(load(given, None), shm=tmp_path).pinned()
