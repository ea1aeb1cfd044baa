"""What small things cost that are done often or waited for: CPU time, the best of several tries."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prelay_text.fingerprint import fingerprint
from prelay_text.render import Part, Renderer, frame

TRIES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a model (see `prelay model path`)")
    args = parser.parse_args()
    renderer = Renderer(
        chat=True, id="chatcmpl-1", created=1_700_000_000, model="demo", system_fingerprint="fp", include_usage=True
    )

    def frames() -> None:
        for _ in range(500):
            frame("1-17,2-15", renderer.text_chunk(0, Part(" some text")))

    report = {
        "frame_us": round(best(frames, own_cpu_s) / 500 * 1e6, 1),  # aim: below 20
        "fingerprint_ms": round(best(lambda: fingerprint(args.model), own_cpu_s) * 1e3, 1),  # aim: below 50
        "help_s": round(best(show_help, children_cpu_s), 2),  # aim: below 1
    }
    print(json.dumps(report))


def best(work: Callable[[], object], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(TRIES):
        start = clock()
        work()
        taken.append(clock() - start)
    return min(taken)


def own_cpu_s() -> float:
    return time.process_time()


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show_help() -> None:
    subprocess.run([sys.executable, "-m", "prelay", "--help"], check=True, capture_output=True)


if __name__ == "__main__":
    main()
