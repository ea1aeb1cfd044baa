"""What the API adds to a request and to a token: wall-clock time of the pure pieces, with a real model's tokenizer.

    python benchmarks/api_layer.py $(prelay model path)
    python benchmarks/api_layer.py --tokens 4000 --profile request.pstats $(prelay model path)

request   from the bytes of a chat to its jobs: JSON, checks, template, token ids, sampling; and each of these alone.
          `next_turn` is the whole of it for a chat whose messages but the last two were asked before
frame     from a piece of text to its server-sent event; with --top likeliest tokens beside it
token     from a token's id to that event: stop strings and text, report, JSON

Chats are of several turns of words from the vocabulary, new ones each time, so that no cache of the tokenizer has seen
more of them than it would of a stranger's text. The least (on a machine that is busy the only figure that says much),
medians and 99th percentiles; collections of garbage count, as they do in a server.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from prelay.bench import facts
from prelay_queue.note import Note, TokenLogprobs
from prelay_text.assembler import Assembler
from prelay_text.render import Part, Renderer, frame
from prelay_text.reports import Reporter
from prelay_text.resolve import JobPart, Limits, resolve
from prelay_text.tokenizer import Tokenizer
from prelay_text.validate import chat_request

#: Frames in one measurement: one takes less than the clock can tell.
FRAMES = 200
#: Messages of a chat.
TURNS = 7
#: Tokens that an answer of the tokens measured has before it begins anew: those of a long answer.
ANSWER = 1000


@dataclass(frozen=True)
class Request:
    """One chat in the forms that it goes through."""

    raw: bytes
    body: dict[str, Any]

    @classmethod
    def of(cls, texts: list[str]) -> Request:
        roles = ["system", *(("user", "assistant") * len(texts))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"model": "demo", "messages": messages, "temperature": 0.7, "stream": True, "max_tokens": 256}
        return cls(orjson.dumps(body), body)


class Requests:
    """Chats whose prompts have about so many tokens, each of other words."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(tokens)
        words = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        self._words = [word for word in words if word.isascii() and word.strip().isalpha()]
        self._count = tokens
        self._count = max(TURNS, tokens * tokens // len(self.ids(self.next())))  # words and tokens differ

    def next(self) -> Request:
        words = self._random.choices(self._words, k=self._count)
        each = -(-len(words) // TURNS)
        return Request.of(["".join(words[start : start + each]) for start in range(0, len(words), each)])

    def ids(self, request: Request) -> tuple[int, ...]:
        (part,) = self.resolve(request.body)
        return part.prompt_ids

    def resolve(self, body: object) -> list[JobPart]:
        return resolve(chat_request(body), self._tokenizer, Limits(10**6), spare_seed=1)


def stages(tokenizer: Tokenizer, requests: Requests) -> dict[str, Callable[[], Callable[[], object]]]:
    """For each stage: a function that prepares one run and returns it."""

    def parse() -> Callable[[], object]:
        raw = requests.next().raw
        return lambda: orjson.loads(raw)

    def check() -> Callable[[], object]:
        body = requests.next().body
        return lambda: chat_request(body)

    def template() -> Callable[[], object]:
        messages = requests.next().body["messages"]
        return lambda: tokenizer.template.render(messages)

    def tokenise() -> Callable[[], object]:
        text = tokenizer.template.render(requests.next().body["messages"])
        return lambda: tokenizer.encode_chat(text)

    def whole() -> Callable[[], object]:
        raw = requests.next().raw
        return lambda: requests.resolve(orjson.loads(raw))

    def next_turn() -> Callable[[], object]:
        request = requests.next()
        requests.resolve({**request.body, "messages": request.body["messages"][:-2]})
        return lambda: requests.resolve(orjson.loads(request.raw))

    return {
        "parse": parse,
        "check": check,
        "template": template,
        "tokenise": tokenise,
        "whole": whole,
        "next_turn": next_turn,
    }


def pieces(tokenizer: Tokenizer, top: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """The same for `FRAMES` frames, and for as many tokens."""
    renderer = Renderer(
        chat=True, id=f"chatcmpl-{24 * '0'}", created=1_700_000_000, model="demo", system_fingerprint="fp_0"
    )
    ids = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    chosen = random.Random(0)

    def answer() -> tuple[list[int], list[str]]:
        found = chosen.choices(ids, k=ANSWER)
        likeliest = (tuple((token, -2.5) for token in chosen.choices(ids, k=top)) for _ in found)
        return found, [Note(TokenLogprobs(-1.5, 3, each)).encode() for each in likeliest]

    def frames(part: Part) -> Callable[[], Callable[[], object]]:
        def run() -> None:
            for _ in range(FRAMES):
                frame("1-17", renderer.text_chunk(0, part))

        return lambda: run

    def tokens(report: bool) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            found, notes = answer()
            assembler, reporter = Assembler(tokenizer, ("\n\nUser:",)), Reporter(tokenizer)
            first = ANSWER - FRAMES  # as late in the answer as it goes
            assembler.push(found[:first])
            reporter.push(found[:first], notes[:first])

            def run() -> None:
                for token, note in zip(found[first:], notes[first:], strict=True):
                    delta = assembler.push([token])
                    reports = reporter.push([token], [note]) if report else None
                    frame("1-17", renderer.text_chunk(0, Part(delta.text if delta else "", reports)))

            return run

        return prepare

    found, notes = answer()
    reports = Reporter(tokenizer).push(found[:1], notes[:1])
    return {
        "frame": frames(Part(" some text")),
        "frame_with_logprobs": frames(Part(" some text", reports)),
        "token": tokens(report=False),
        "token_with_logprobs": tokens(report=True),
    }


def measured(prepare: Callable[[], Callable[[], object]], runs: int) -> Iterator[float]:
    """Seconds of each run, after one that does not count."""
    prepare()()
    for _ in range(runs):
        run = prepare()
        start = time.perf_counter()
        run()
        yield time.perf_counter() - start


def summary(seconds: Iterator[float], unit: float) -> dict[str, float]:
    found = sorted(seconds)
    late = found[min(len(found) - 1, int(len(found) * 0.99))]
    figures = {"least": found[0], "p50": statistics.median(found), "p99": late}
    return {name: round(figure * unit, 3) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model (see `prelay model path`)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a chat's prompt (%(default)s)")
    parser.add_argument("--top", type=int, default=5, help="likeliest tokens beside each (%(default)s)")
    parser.add_argument("--runs", type=int, default=200, help="measurements of each (%(default)s)")
    parser.add_argument("--profile", type=Path, help="also profile whole requests, and write this file for pstats")
    args = parser.parse_args()
    found = facts.begin()
    tokenizer = Tokenizer.load(args.model)
    requests = Requests(tokenizer, args.tokens)
    report: dict[str, Any] = {"prompt_tokens": len(requests.ids(requests.next())), "top": args.top, "runs": args.runs}
    for name, prepare in stages(tokenizer, requests).items():  # aim: whole below 3 ms
        report[f"request_{name}_ms"] = summary(measured(prepare, args.runs), 1e3)
    for name, prepare in pieces(tokenizer, args.top).items():  # aim: a frame below 20 us
        report[f"{name}_us"] = summary(measured(prepare, args.runs), 1e6 / FRAMES)
    facts.finish(found)
    json.dump({**report, "facts": found}, sys.stdout, indent=2)
    print()
    if args.profile:
        profile(requests, args.runs, args.profile)


def profile(requests: Requests, runs: int, file: Path) -> None:
    raws = [requests.next().raw for _ in range(runs)]
    with cProfile.Profile() as found:
        for raw in raws:
            requests.resolve(orjson.loads(raw))
    found.dump_stats(file)


if __name__ == "__main__":
    main()
