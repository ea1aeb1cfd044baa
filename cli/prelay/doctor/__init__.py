"""`prelay doctor`: what this machine, these settings and this server are good for, and what to do about the rest.

A check is one function in one of the modules below `GROUPS`; registry.py says how it is entered and run.
"""

from __future__ import annotations

from rich.console import Console

from ..settings import Settings
from . import configuration, devices, leftovers, machine, server
from .facts import Facts
from .registry import run
from .table import as_json, show

#: The parts of the table, in its order.
GROUPS = (machine.checks, devices.checks, configuration.checks, server.checks, leftovers.checks)


def doctor(settings: Settings, *, fix: bool = False, json: bool = False) -> int:
    """Run all checks and print what they found. Return 1 when one failed, else 0."""
    result = run(GROUPS, Facts(settings, fix))
    if json:
        print(as_json(result))
    else:
        show(result, Console(highlight=False))
    return 0 if result.is_sound else 1
