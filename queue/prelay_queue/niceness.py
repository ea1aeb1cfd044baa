"""How far a process stands back for others on its machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

#: Linux shares time among sessions (autogroups) first, and looks at the niceness of processes only within one; a
#: session has one of its own, which stands here.
_AUTOGROUP = Path("/proc/self/autogroup")
#: Whoever is not root may change one of these each tenth of a second, on the whole machine.
_TRIES, _PAUSE_S = 20, 0.11


def stand_back(nice: int) -> None:
    """Add to this process's niceness, and to that of its session if it leads one, where the system has such a thing.

    Threads and processes that begin afterwards have it too. `nice` is 0 to 19; at 5 others get three times as much of a
    core that is wanted by both, at 10 nine times as much.
    """
    if not nice:
        return
    now = os.nice(nice)
    if os.getsid(0) != os.getpid():
        return  # it is somebody else's, too: a terminal's, say
    with suppress(OSError):
        for _ in range(_TRIES):
            try:
                _AUTOGROUP.write_text(str(now))
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
