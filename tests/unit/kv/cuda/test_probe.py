"""The probe, with real child processes: what they find out, and that they leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from prelay_kv.cuda import probe
from prelay_kv.cuda.paths import AUTO, CUDA_IPC, PINNED, Facts, ProbeResult
from prelay_kv.cuda.probe import choose_path, gather, run_probe
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import CudaError, KvError
from tests.bed.cudart import FakeGpus, library


@pytest.fixture(autouse=True)
def all_is_freed(gpus: FakeGpus) -> Iterator[None]:
    """However a probe ends, no memory of this process stays, and no error waits for the next call."""
    yield
    assert gpus.spans() == 0
    assert gpus.pending_error() == 0


def child(code: str) -> tuple[str, ...]:
    """A child that runs `code` instead of the probe."""
    return (sys.executable, "-c", code)


def test_a_child_reads_what_this_process_wrote(runtime: Cudart) -> None:
    assert run_probe(runtime, 0) == ProbeResult(True)


def test_the_child_finds_the_device_by_its_name(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=3, no_p2p="all")
    assert run_probe(runtime, 2) == ProbeResult(True)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (1, "cudaErrorInvalidValue"),
        (201, "cudaErrorDeviceUninitialized"),
        (217, "cudaErrorPeerAccessUnsupported"),
        (801, "cudaErrorNotSupported"),
    ],
)
def test_a_handle_that_does_not_open_is_said_with_the_runtime_s_words(
    gpus: FakeGpus, runtime: Cudart, code: int, name: str
) -> None:
    gpus.set(fail=f"cudaIpcOpenMemHandle={code}")
    assert run_probe(runtime, 0) == ProbeResult(False, f"cudaIpcOpenMemHandle: {name} ({code})", code)


def test_processes_of_one_number_are_found_out(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(pid=7)
    assert run_probe(runtime, 0).code == 201


def test_memory_that_cannot_be_exported_needs_no_child(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(fail="cudaIpcGetMemHandle=801")
    found = run_probe(runtime, 0, command=("/nowhere",))
    assert found == ProbeResult(False, "cudaIpcGetMemHandle: cudaErrorNotSupported (801)", 801)


def test_a_child_that_hangs_is_killed_before_the_memory_goes(gpus: FakeGpus) -> None:
    # Given a child that has the memory mapped and never ends
    code = (
        "import json, sys, time; from prelay_kv.cuda.runtime import Cudart; asked = json.loads(sys.stdin.readline()); "
        "Cudart(asked['library']).ipc_open(bytes.fromhex(asked['handle'])); time.sleep(60)"
    )

    class Watched(Cudart):
        def free(self, pointer: int) -> None:
            super().free(pointer)
            left.append(gpus.used())

    left: list[int] = []
    # When it is waited for
    found = run_probe(Watched(library()), 0, command=child(code), timeout_s=1.0)
    # Then it is given up, and nobody had the memory mapped any more when it was freed
    assert found == ProbeResult(False, "no answer in 1 s")
    assert left == [0]


def test_a_worker_that_is_stopped_meanwhile_takes_the_child_with_it(gpus: FakeGpus, runtime: Cudart) -> None:
    stop = "import os, signal, sys, time; sys.stdin.readline(); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        run_probe(runtime, 0, command=child(stop))
    assert gpus.used() == 0


def test_a_child_that_dies_is_told_by_its_signal(runtime: Cudart) -> None:
    found = run_probe(runtime, 0, command=child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert found == ProbeResult(False, "it was ended by signal 9")


def test_a_child_that_fails_is_told_by_its_last_words(runtime: Cudart) -> None:
    found = run_probe(runtime, 0, command=child("raise OSError('no driver')"))
    assert found == ProbeResult(False, "it ended with 1: OSError: no driver")


def test_a_child_that_does_not_start_is_no_crash(runtime: Cudart) -> None:
    found = run_probe(runtime, 0, command=("/nowhere/python",))
    assert found == ProbeResult(False, "/nowhere/python could not be started: No such file or directory")


@pytest.mark.parametrize(
    "answer", ["", "nonsense", "[]", "{}", '{"ok": true}', '{"ok": false}', '{"ok": true, "bytes": 7}']
)
def test_a_child_that_answers_nonsense_proves_nothing(runtime: Cudart, answer: str) -> None:
    found = run_probe(runtime, 0, command=child(f"print({answer!r})"))
    assert found == ProbeResult(False, f"it answered {answer!r}")


def test_a_child_that_reads_other_memory_proves_nothing(runtime: Cudart) -> None:
    found = run_probe(runtime, 0, command=child("""print('{"ok": true, "bytes": "00ff"}')"""))
    assert found == ProbeResult(False, "it read something else than what was written")


def test_what_a_driver_says_before_the_answer_does_not_disturb(runtime: Cudart) -> None:
    code = "from prelay_kv.cuda.probe import main; print('NVRM: hello', flush=True); main()"
    assert run_probe(runtime, 0, command=child(code)).ok


def test_a_device_that_the_child_does_not_see_is_named(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2)
    uuid = runtime.device_uuid(1)
    code = "import os; os.environ['FAKE_CUDART_VISIBLE'] = '0'; from prelay_kv.cuda.probe import main; main()"
    found = run_probe(runtime, 1, command=child(code))
    assert not found.ok
    assert f"LookupError: {uuid} is not among" in found.what


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaMemcpyAsync"])
def test_a_device_that_this_process_cannot_use_itself_is_an_error(gpus: FakeGpus, runtime: Cudart, call: str) -> None:
    gpus.set(fail=f"{call}=2")
    with pytest.raises(CudaError, match=call):
        run_probe(runtime, 0)


def test_an_error_that_breaks_the_device_is_no_result(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(fail="cudaIpcGetMemHandle=700")
    with pytest.raises(KvError, match="700"):
        run_probe(runtime, 0)


def test_the_child_imports_no_torch() -> None:
    code = "import prelay_kv.cuda.probe, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run(child(code), capture_output=True, check=True, text=True).stdout == "[]\n"


def test_a_child_without_a_parent_is_ended_by_the_clock() -> None:
    code = "import prelay_kv.cuda.probe as probe; probe.LIMIT_S = 0.2; probe.main()"
    with subprocess.Popen(child(code), stdin=subprocess.PIPE) as alone:  # which never asks
        assert alone.wait(timeout=10) == -signal.SIGALRM


# What is gathered, and chosen


def test_the_facts_name_the_devices_that_cannot_reach_this_one(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=4, no_p2p="0-2,1-3,2-3")
    assert gather(runtime, 0) == Facts(without_peer_access=(2,), probe=ProbeResult(True))
    assert gather(runtime, 3) == Facts(without_peer_access=(1, 2), probe=ProbeResult(True))


def test_what_counts_is_the_way_from_the_other_device_to_this_one(gpus: FakeGpus) -> None:
    class OneWay(Cudart):
        def can_access_peer(self, device: int, peer: int) -> bool:
            return (device, peer) == (1, 0)

    gpus.set(devices=2)
    assert gather(OneWay(library()), 0).without_peer_access == ()
    assert gather(OneWay(library()), 1).without_peer_access == (0,)


def test_a_slice_of_a_card_is_known_without_a_probe(
    gpus: FakeGpus, runtime: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.set(mig=1)
    monkeypatch.setattr(probe, "run_probe", None)
    assert gather(runtime, 0) == Facts(mig=True)
    assert choose_path(AUTO, runtime, 0).kind == PINNED


def test_a_machine_that_can_maps_the_gpu_s_memory(runtime: Cudart) -> None:
    assert choose_path(AUTO, runtime, 0).kind == CUDA_IPC


def test_a_machine_that_cannot_takes_host_memory_and_says_why(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(fail="cudaIpcOpenMemHandle=801")
    path = choose_path(AUTO, runtime, 0)
    assert path.kind == PINNED
    assert "cudaErrorNotSupported (801)" in path.reason


def test_what_is_asked_for_is_tried_all_the_same_for_the_warning(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2, no_p2p="all")
    path = choose_path(CUDA_IPC, runtime, 0)
    assert path.kind == CUDA_IPC
    assert "peer-to-peer access to this device from 1" in path.reason


def test_host_memory_that_is_asked_for_needs_no_look_at_the_device(
    gpus: FakeGpus, runtime: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "gather", None)
    assert choose_path(PINNED, runtime, 0).kind == PINNED
