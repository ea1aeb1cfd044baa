"""The parent: what is asked for, in which order it is checked, and what is said at the end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from . import facts, page
from .board import Board
from .budget import Budget
from .catalogue import CHECKS, PARTS, Check, names
from .crew import Crew
from .fakes import fake_card
from .folders import environment, search_path

_FILE = Path("gpu_check.json")
NO_CARD, CUT_OFF = 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: everything passed. 1: something failed, missed its aim or was skipped. 3: there is no card.

    130: it was interrupted.
    """
    args = _parser().parse_args(arguments)
    if args.facts:
        return facts.main()
    if args.child or args.peer:
        return _serve(args)
    if args.list:
        print(page.table(page.load(args.json)), end="")
        return 0
    return _check(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description="Prove the GPU code on this machine's first card."
    )
    parser.add_argument("--seconds", type=float, default=420, help="for all of it (420); what finds no time is skipped")
    parser.add_argument("--only", type=_chosen, default=(), help="parts or checks, as in ipc,kernels.linear")
    parser.add_argument(
        "--json", type=Path, help="results, after every check (gpu_check.json); --only keeps the others"
    )
    parser.add_argument("--list", action="store_true", help="print all checks in Markdown, with the figures of --json")
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    for inner in ("--child", "--peer"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chosen(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    known = {*names(), *(check.full_name for check in CHECKS)}
    if unknown := [name for name in chosen if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}: parts are {', '.join(names())}")
    return chosen


def _serve(args: argparse.Namespace) -> int:
    """Be one of the processes that the parent starts."""
    sys.path[:0] = search_path()
    if args.child:
        from . import child

        return child.main(args.child, args.rehearse)
    from . import peer

    return peer.main(args.peer, args.rehearse)


def _check(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with ExitStack() as last:
        children = environment(os.environ)
        found: dict[str, Any]
        if args.rehearse:
            children |= last.enter_context(fake_card())
            found = {"card": "none: a rehearsal, whose figures mean nothing"}
        else:
            found = facts.ask(children)
        if why := found.get("problem"):
            print(f"gpu_check: no card to check on: {why}", flush=True)
            return NO_CARD
        board = Board(args.json or _FILE, found, args.rehearse, keep=bool(args.only))
        board.say(", ".join(f"{name} {value}" for name, value in found.items() if value))
        budget = Budget(began + args.seconds)
        signal.signal(signal.SIGTERM, _interrupted)
        try:
            _run(args, board, budget, children)
        except KeyboardInterrupt:
            print(board.table(), "cut off: the rest was not checked", sep="\n", flush=True)
            return CUT_OFF
        print(board.table(), flush=True)
        return board.code(_chosen_checks(args))


def _run(args: argparse.Namespace, board: Board, budget: Budget, children: dict[str, str]) -> None:
    chosen = _chosen_checks(args)
    parts = [part for part in PARTS if any(check.part == part.name for check in chosen)]
    for number, part in enumerate(parts):
        checks: list[Check] = [check for check in chosen if check.part == part.name]
        now = time.monotonic()
        ends = budget.part_ends(now, part, parts[number + 1 :])
        board.say(f"{part.name}: {len(checks)} checks in at most {ends - now:.0f} s")
        Crew(part, board, budget, children, args.rehearse).run(checks, ends)


def _chosen_checks(args: argparse.Namespace) -> list[Check]:
    return [check for check in CHECKS if not args.only or {check.part, check.full_name} & set(args.only)]


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt
