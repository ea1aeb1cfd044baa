"""Where the processes of one `prelay serve` keep their metrics, and what their supervisor counts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from prelay_queue.metric_table import Part
from prelay_queue.metrics import FOLDER, PLACE, Metrics

from .settings import Settings

#: Variables of ours that no child inherits.
VARIABLES = (FOLDER, PLACE)


def empty_folder(settings: Settings, warn: Callable[[str], None]) -> Path | None:
    """Make the folder, or empty it: what is counted begins with us. None where that cannot be."""
    folder = settings.state_dir.absolute() / "metrics" / str(settings.port)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        warn(f"/metrics shows one process only: cannot make {folder}: {error.strerror}")
        return None
    return folder


def variables(folder: Path | None, place: str) -> dict[str, str]:
    """What tells the process of a place in the fleet where it keeps its metrics."""
    return {FOLDER: str(folder), PLACE: place} if folder else {}


class FleetMetrics:
    """What the supervisor counts: processes that it starts again."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        os.environ.update(variables(folder, "supervisor"))
        self._metrics = Metrics(Part.SUPERVISOR)

    def restarted(self, name: str) -> None:
        """Count a restart of a child, by its role."""
        self._metrics.inc("prelay_restarts_total", re.sub(r"-\d+$", "", name))

    def close(self) -> None:
        """Remove the folder, after the last process has ended."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
