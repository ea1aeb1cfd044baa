"""Standing back counts for the session that a process leads, and for no session of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os, sys
from pathlib import Path
from prelay_queue.niceness import stand_back
stand_back(int(sys.argv[1]))
session = Path("/proc/self/autogroup")
print(os.nice(0), *(session.read_text().split()[-1:] if session.exists() else []))
"""


def of_my_session() -> list[int]:
    """The niceness of this session: none on systems without such a thing, or where nobody ever began a session."""
    return [int(word) for word in (AUTOGROUP.read_text().split()[-1:] if AUTOGROUP.exists() else [])]


def said(nice: int, *, leads: bool) -> list[int]:
    """The niceness of a process that stood back, and of its session, where there is such a thing."""
    command = [sys.executable, "-c", PROGRAM, str(nice)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, start_new_session=leads).stdout
    return [int(word) for word in out.split()]


@pytest.mark.parametrize("nice", [0, 3])
def test_a_process_and_the_session_that_it_leads_stand_back(nice: int) -> None:
    mine = os.nice(0)
    process, *session = said(nice, leads=True)
    assert process == min(19, mine + nice)
    assert session in ([], [process if nice else 0])


def test_a_session_of_others_stays_as_it_is() -> None:
    process, *session = said(3, leads=False)
    assert process == min(19, os.nice(0) + 3)
    assert session == of_my_session()
