"""Where the time of a job goes, from trace marks (PRELAY_TRACE): p50 and p99 of each stage, in milliseconds."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

#: (name, from, to) between marks of one job; the first mark of each point counts.
STAGES = (
    ("submit to prefill start", "api.submit", "prefill.start"),
    ("prefill", "prefill.start", "prefill.sampled"),
    ("hand-over: sampled to decode start", "prefill.sampled", "decode.start"),
    ("hand-over: copy", "decode.start", "decode.copied"),
    ("first token: sampled to socket", "prefill.sampled", "api.send"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    first: dict[str, dict[str, int]] = defaultdict(dict)
    last: dict[str, int] = {}
    steps: dict[tuple[str, int], int] = {}
    sends: dict[tuple[str, int], int] = {}
    for file in args.folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            at, point, job, seq = json.loads(line)
            first[job].setdefault(point, at)
            first[job][point] = min(first[job][point], at)
            if point == "step.end":
                steps[job, seq] = at
            if point == "api.send":
                sends[job, seq] = at
                last[job] = max(last.get(job, 0), at)
    report: dict[str, object] = {"jobs": len(first)}
    for name, start, end in STAGES:
        report[name] = quantiles([m[end] - m[start] for m in first.values() if start in m and end in m])
    report["step end to socket"] = quantiles([sends[key] - at for key, at in steps.items() if key in sends])
    shares = [
        (m["decode.copied"] - m["prefill.sampled"]) / (last[job] - m["api.submit"])
        for job, m in first.items()
        if {"decode.copied", "prefill.sampled", "api.submit"} <= m.keys() and job in last
    ]
    report["hand-over share of E2E, %"] = {
        f"p{q}": round(100 * sorted(shares)[min(len(shares) - 1, len(shares) * q // 100)], 2)
        for q in (50, 99)
        if shares
    }
    print(json.dumps(report, indent=1))


def quantiles(nanoseconds: list[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    if not ordered:
        return {}
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)] / 1e6, 2) for q in (50, 99)}


if __name__ == "__main__":
    main()
