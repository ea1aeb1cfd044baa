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
def test_a_worker_on_a_gpu_is_refused_in_one_line_that_says_why(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--device", "cuda", "--redis-url", "redis://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said == "prelay: --device must be cpu, not cuda: workers that compute on GPUs are not built yet\n"


def test_a_worker_where_torch_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    with pytest.raises(BadUsage, match=r"install prelay\[workers\]"):
        check_device(load({}, None))
    check_device(load({"null_model": True}, None))
