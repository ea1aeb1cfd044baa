"""What workers compute on, and whether this installation can."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import BadUsage
from .settings import Settings


def check_device(settings: Settings) -> None:
    """Raise BadUsage when no worker could compute here: for what contradicts itself, or is not installed.

    Whether there is a GPU, and a driver for it, is the worker's to say: asking takes seconds.
    """
    if settings.null_model:
        return
    if find_spec("torch") is None:
        raise BadUsage("torch is not installed, and workers need it: install prelay[workers]")
    if settings.device == "cuda":
        _check_cuda(settings)


def _check_cuda(settings: Settings) -> None:
    if settings.quantization != "none":
        raise BadUsage(f"--quantization must be none with --device cuda, not {settings.quantization}: it is for CPUs")
    if settings.kernels == "native":
        raise BadUsage("--kernels must be auto with --device cuda, not native: those are for CPUs")
    if find_spec("triton") is None:
        raise BadUsage("triton is not installed, and workers on GPUs need it: install a build of torch with CUDA")
