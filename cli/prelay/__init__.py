"""The `prelay` command, and the supervisor behind `prelay serve`."""

from prelay_queue import __version__

__all__ = ["__version__"]
