"""Errors of the engine.

EngineError
├── ConfigError     a setting out of its range; the message names the setting, the limit and the value
├── ModelError      the model folder is missing, broken or of a kind this engine refuses to run
├── NoRoom          no blocks or no slot for this sequence now; a later try may succeed
├── OutOfMemory     a step found no memory for what it computes in between; nothing of it counts
├── CaptureError    a step does what no CUDA graph can hold; it runs without one
├── Abandoned       a step was given up, as it was asked to be; nothing of it counts
├── UnknownSequence no sequence of this key, or not in a state that allows the call
└── DemoError       the demo model could not be downloaded or converted
"""

from __future__ import annotations


class EngineError(Exception):
    """The engine could not do what was asked."""


class ConfigError(EngineError):
    """A setting is out of its range."""

    def __init__(self, name: str, limit: str, value: object) -> None:
        super().__init__(f"{name} must be {limit}, not {value!r}")
        self.name = name


class ModelError(EngineError):
    """The model cannot be served; the message is one line and says why."""


class NoRoom(EngineError):  # noqa: N818 - reads as the fact it states
    """There are not enough free blocks, or no free slot, for this sequence now."""


class OutOfMemory(EngineError):  # noqa: N818
    """The device has no memory for what the step computes in between."""

    def __init__(self, message: str = "the device has no memory left") -> None:
        super().__init__(message)


class CaptureError(EngineError):
    """What a step does cannot be captured; the message is one line and says why."""


class Abandoned(EngineError):  # noqa: N818
    """The step was given up for somebody more urgent."""


class UnknownSequence(EngineError):  # noqa: N818
    """There is no such sequence here, or its state does not allow this call."""


class DemoError(EngineError):
    """The demo model could not be fetched."""
