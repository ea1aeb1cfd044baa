"""A process that runs checks of one part, as its parent asks for them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from .found import FAILED, Found, Wrong
from .lines import Answers
from .rig import Rig

Run = Callable[[Rig], Found]


def main(part: str, rehearse: bool) -> int:
    answers = Answers()
    runs: dict[str, Run] | None = None
    rig: Rig | None = None
    for name in answers.asked():
        began, broken = time.monotonic(), False
        try:
            if runs is None or rig is None:
                runs = import_module(f".{part}_checks", __package__).RUNS
                rig = Rig.here(rehearse, lambda text: answers.say({"say": text}))
            found = runs[name.partition(".")[2]](rig)
        except Wrong as error:
            found = Found(FAILED, why=str(error))
        except Exception as error:
            found = Found(FAILED, why=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            traceback.print_exc()
        if rig is None or not rig.sound():
            broken = True
        answers.say({"found": replace(found, seconds=time.monotonic() - began).as_dict(), "broken": broken})
        if broken:
            return 1
    if rig is not None:
        rig.close()
    return 0
