"""Finding the CUDA runtime, and what its calls make of numbers and errors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from prelay_kv.cuda import runtime as module
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import CudaError, KvError, NoCudaRuntime
from tests.bed.cudart import FakeGpus, library


def test_an_error_says_call_name_and_number(runtime: Cudart) -> None:
    with pytest.raises(CudaError, match=r"cudaFree: cudaErrorInvalidValue \(1\)") as caught:
        runtime.free(4096)
    assert isinstance(caught.value, KvError)
    assert (caught.value.call, caught.value.code, caught.value.name) == ("cudaFree", 1, "cudaErrorInvalidValue")
    assert not caught.value.fatal


@pytest.mark.parametrize(
    ("code", "fatal"), [(2, False), (201, False), (217, False), (700, True), (719, True), (721, True)]
)
def test_an_error_that_breaks_the_device_for_this_process_is_fatal(
    gpus: FakeGpus, runtime: Cudart, code: int, fatal: bool
) -> None:
    gpus.set(fail=f"cudaMalloc={code}")
    with pytest.raises(CudaError) as caught:
        runtime.malloc(1)
    assert (caught.value.code, caught.value.fatal) == (code, fatal)


def test_a_failed_call_leaves_no_error_for_torch_to_find(gpus: FakeGpus, runtime: Cudart) -> None:
    with pytest.raises(CudaError):
        runtime.free(4096)
    assert gpus.pending_error() == 0


def test_a_device_is_named_by_its_uuid_and_a_slice_as_one(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2)
    assert runtime.device_uuid(1) == "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01"
    gpus.set(visible="1")
    assert runtime.device_uuid(0) == "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01"
    gpus.set(mig=1)
    assert runtime.device_uuid(0) == "MIG-fafafafa-fafa-fafa-fafa-fafafafafa01"


def test_a_machine_without_a_device_has_none(gpus: FakeGpus, runtime: Cudart) -> None:
    assert runtime.device_count() == 1
    gpus.set(devices=0)
    assert runtime.device_count() == 0
    gpus.set(fail="cudaGetDeviceCount=35")
    with pytest.raises(CudaError, match="35"):
        runtime.device_count()


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_handle_of_another_length_never_reaches_the_driver(runtime: Cudart, length: int) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        runtime.ipc_open(bytes(length))


def test_bytes_are_written_and_read_also_past_zeros_and_by_other_threads(runtime: Cudart) -> None:
    pointer = runtime.malloc(1 << 20)
    data = b"\0a\0b" * 1000 + b"\0"
    thread = threading.Thread(target=runtime.write, args=(pointer + 5, data))
    thread.start()
    thread.join()
    assert runtime.read(pointer + 5, len(data)) == data
    runtime.free(pointer)


# Finding it


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No runtime is named, loaded or installed; what this process has mapped is the file that is returned."""
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0\n")
    monkeypatch.delenv("PRELAY_CUDART", raising=False)
    monkeypatch.setattr(module, "_MAPS", maps)
    monkeypatch.setattr(module, "_NAMES", ("libcudart.so.none",))
    monkeypatch.setattr(module, "_beside_torch", lambda: iter(()))
    return maps


def test_the_runtime_that_the_environment_names_is_taken(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_CUDART", str(library()))
    assert Cudart.find().path == str(library())


@pytest.mark.parametrize("path", ["/nowhere/libcudart.so", "libc.so.6"])
def test_a_runtime_that_is_named_and_cannot_be_used_is_an_error_with_the_name_of_the_variable(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("PRELAY_CUDART", path)
    with pytest.raises(NoCudaRuntime, match=f"PRELAY_CUDART={path}"):
        Cudart.find()


def as_cudart(folder: Path, name: str = "libcudart-1a2b.so.12") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(library().read_bytes())
    return path


def test_the_runtime_that_is_loaded_already_goes_before_the_linker_s(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = as_cudart(tmp_path / "with a_torch")
    plain = as_cudart(tmp_path / "torch")
    nowhere.write_text(
        f"7f00-7f01 r-xp 00000000 00:00 0\n7f02-7f03 r--p 00000000 fe:00 12      {plain} (deleted)\n"
        f"7f02-7f03 r--p 00000000 fe:00 12      {plain}\n7f02-7f03 r--p 00000000 fe:00 12      {loaded}\n"
    )
    monkeypatch.setattr(module, "_NAMES", (str(library()),))
    assert Cudart.find().path == str(plain)
    nowhere.write_text(f"7f02-7f03 r--p 00000000 fe:00 12      {loaded}\n")
    assert Cudart.find().path == str(loaded)
    nowhere.write_text("")
    assert Cudart.find().path == str(library())


def test_the_runtime_beside_torch_is_the_last_try(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("PRELAY_CUDART", raising=False)
    monkeypatch.setattr(module, "_MAPS", nowhere)
    monkeypatch.setattr(module, "_NAMES", ("libcudart.so.none",))
    path = as_cudart(tmp_path / "site" / "nvidia" / "cuda_runtime" / "lib", "libcudart.so.12")

    class Spec:
        origin = str(tmp_path / "site" / "torch" / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    assert Cudart.find().path == str(path)


def test_a_machine_without_a_runtime_says_what_to_set(nowhere: Path) -> None:
    with pytest.raises(NoCudaRuntime, match=r"libcudart.so.none\): set PRELAY_CUDART"):
        Cudart.find()


def test_a_real_runtime_has_every_call_by_its_name() -> None:
    try:
        found = Cudart.find()
    except NoCudaRuntime:
        pytest.skip("no CUDA runtime is installed")
    assert found.path != str(library())
    try:
        count = found.device_count()
    except CudaError as error:  # no driver
        count, name = 0, error.name
    else:
        name = "cudaSuccess"
    assert name.startswith("cuda")
    assert all(found.device_uuid(device)[:4] in ("GPU-", "MIG-") for device in range(count))
