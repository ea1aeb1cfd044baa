"""Watch a stream survive preempts: the server evicts it on the way, and an undisturbed run is compared with it.

prelay serve &
python scripts/watch_preempt.py                          # preempts at 8, 20 and 33 tokens
python scripts/watch_preempt.py --svg docs/preempt.svg   # and keep what the terminal showed
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

PROMPT = "Write three sentences about a lighthouse keeper who reads by lamplight."


class Screen:
    """The terminal, and what it showed."""

    def __init__(self) -> None:
        self._console = Console()
        self._shown = Text()

    def show(self, words: str, style: str = "") -> None:
        self._console.print(Text(words, style), end="", soft_wrap=True)
        self._shown.append(words, style)

    def save(self, path: Path) -> None:
        """Write it as SVG, in fonts that the reader has: rich's own would be fetched from elsewhere."""
        recorder = Console(record=True, file=io.StringIO(), width=100)
        recorder.print(self._shown)
        svg = recorder.export_svg(title="a stream survives three preempts")
        path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


def events(client: httpx.Client, body: dict[str, object]) -> Iterator[tuple[int, int, str, dict[str, object]]]:
    """(epoch, seq after the frame, text, the event) of each frame of a stream."""
    epoch, seq = 1, 0
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("id: "):
                epoch, seq = map(int, line[4:].split("-"))
            elif line.startswith("data: {"):
                event = json.loads(line[6:])
                yield epoch, seq, event["choices"][0]["delta"].get("content") or "", event


def watch(screen: Screen, client: httpx.Client, body: dict[str, object], points: list[int]) -> str:
    """Stream, ask for a preempt at each of `points`, and show where the answer changed hands."""
    text, at, left, started = "", 1, sorted(points), 0.0
    for epoch, seq, piece, event in events(client, body):
        if epoch > at:
            waited = time.monotonic() - started
            screen.show(f"\n◀ epoch {epoch} goes on from token {seq}, {waited:.2f} s later\n", "bold green")
            at = epoch
        text += piece
        screen.show(piece)
        if left and seq + 1 >= left[0]:
            left.pop(0)
            client.post(f"/admin/jobs/{event['id']}/preempt").raise_for_status()
            screen.show("\n▶ preempt: its KV is freed, the job goes back to step 1\n", "bold red")
            started = time.monotonic()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--at", type=int, nargs="*", default=[8, 20, 33], help="delivered tokens at which to preempt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--svg", type=Path, help="write what the terminal showed to this file")
    args = parser.parse_args()
    try:
        same = run(args)
    except httpx.HTTPError as error:
        raise SystemExit(f"watch_preempt: {args.url} does not serve this: {error}") from None
    raise SystemExit(0 if same else 1)


def run(args: argparse.Namespace) -> bool:
    """Stream with preempts and without; whether both texts are equal."""
    screen = Screen()
    key = os.environ.get("PRELAY_API_KEY", "").partition(",")[0]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=args.url, headers=headers, timeout=120) as client:
        body: dict[str, object] = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 60,
            "temperature": args.temperature,
            "seed": 7,
        }
        screen.show(f"$ python scripts/watch_preempt.py --temperature {args.temperature}\n\n", "bold")
        disturbed = watch(screen, client, body, args.at)
        undisturbed = "".join(piece for *_, piece, _ in events(client, body))
    same = disturbed == undisturbed
    screen.show("\n\nThe same request, undisturbed: ")
    verdict = ("equal, character for character", "bold green") if same else ("DIFFERENT", "bold red")
    screen.show(*verdict)
    screen.show(f" ({len(undisturbed)} characters).\n")
    if args.svg:
        screen.save(args.svg)
    return same


if __name__ == "__main__":
    main()
