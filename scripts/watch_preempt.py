"""Watch a stream survive preempts: the server evicts it on the way, and an undisturbed run is compared with it.

prelay serve &
python scripts/watch_preempt.py                          # preempts at 8, 20 and 33 tokens
python scripts/watch_preempt.py --svg docs/preempt.svg   # and keep what the terminal showed
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import httpx
from rich.console import Console

PROMPT = "Write three sentences about a lighthouse keeper who reads by lamplight."


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


def watch(console: Console, client: httpx.Client, body: dict[str, object], points: list[int]) -> str:
    """Stream, ask for a preempt at each of `points`, and show where the answer changed hands."""
    text, at, left, started = "", 1, sorted(points), 0.0
    for epoch, seq, piece, event in events(client, body):
        if epoch > at:
            waited = time.monotonic() - started
            console.print(f"[bold green]◀ epoch {epoch} goes on from token {seq}, {waited:.2f} s later[/]", end=" ")
            at = epoch
        text += piece
        console.print(piece, end="", markup=False, highlight=False)
        if left and seq + 1 >= left[0]:
            left.pop(0)
            client.post(f"/admin/jobs/{event['id']}/preempt").raise_for_status()
            console.print(" [bold red]▶ preempt: KV freed, job re-queued[/]", end=" ")
            started = time.monotonic()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--at", type=int, nargs="*", default=[8, 20, 33], help="delivered tokens at which to preempt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--svg", help="write what the terminal showed to this file")
    args = parser.parse_args()
    console = Console(record=True, width=100)
    try:
        run(args, console)
    except httpx.HTTPError as error:
        raise SystemExit(f"watch_preempt: {args.url} does not serve this: {error}") from None


def run(args: argparse.Namespace, console: Console) -> None:
    """Stream with preempts and without, compare, and say so in the exit code."""
    with httpx.Client(base_url=args.url, timeout=120) as client:
        body: dict[str, object] = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 60,
            "temperature": args.temperature,
            "seed": 7,
        }
        console.print(f"[bold]$ python scripts/watch_preempt.py --temperature {args.temperature}[/]\n")
        disturbed = watch(console, client, body, args.at)
        undisturbed = "".join(piece for *_, piece, _ in events(client, body))
    same = disturbed == undisturbed
    verdict = "[bold green]equal, character for character[/]" if same else "[bold red]DIFFERENT[/]"
    console.print(f"\n\nThe same request, undisturbed: {verdict} ({len(undisturbed)} characters).")
    if args.svg:
        console.save_svg(args.svg, title="a stream survives three preempts")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
