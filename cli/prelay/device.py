"""What workers compute on, and whether this installation can."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import BadUsage
from .settings import Settings


def check_device(settings: Settings) -> None:
    """Raise BadUsage when no worker could compute here: for what is not built yet, and for what is not installed."""
    if settings.device == "cuda":
        raise BadUsage("--device must be cpu, not cuda: workers that compute on GPUs are not built yet")
    if not settings.null_model and find_spec("torch") is None:
        raise BadUsage("torch is not installed, and workers need it: install prelay[workers]")
