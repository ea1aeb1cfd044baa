"""What cannot compute is refused at the start, in words."""

from __future__ import annotations

import pytest

from prelay import device
from prelay.device import check_device
from prelay.errors import BadUsage
from prelay.main import main
from prelay.settings import load


def test_the_cpu_is_taken() -> None:
    check_device(load({}, None))


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "unified"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--quantization", "w8a8"), "--quantization must be none with --device cuda, not w8a8: it is for CPUs"),
        (("--kernels", "native"), "--kernels must be auto with --device cuda, not native: those are for CPUs"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
    ],
)
def test_what_no_worker_on_a_gpu_can_do_is_refused_in_one_line_that_says_why(
    command: str, given: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--device", "cuda", *given, "--redis-url", "redis://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"prelay: {why}")
    assert said.count("\n") == 1


def test_a_worker_on_a_gpu_where_triton_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None if name == "triton" else name)
    check_device(load({}, None))
    with pytest.raises(BadUsage, match="triton is not installed"):
        check_device(load({"device": "cuda"}, None))


def test_a_worker_where_torch_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    with pytest.raises(BadUsage, match=r"install prelay\[workers\]"):
        check_device(load({}, None))
    check_device(load({"null_model": True}, None))
