"""From the file to lines that are run or refused."""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest

from prelay_batch.life import Line
from prelay_batch.reading import Ask, Reader, Unfit, spare_seed
from prelay_files.bitmap import Bitmap
from prelay_text.resolve import Limits
from prelay_text.tokenizer import Tokenizer
from tests.bed.batch import COMPLETIONS, jsonl, line
from tests.bed.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("model")))


def reader(tokenizer: Tokenizer, content: bytes, *done: int, limit: int = 4096) -> Reader:
    bits = Bitmap()
    for number in done:
        bits.add(number)
    ask = Ask("batch", COMPLETIONS, "null", tokenizer, lambda: Limits(limit))
    return Reader(ask, io.BytesIO(content), len(content.splitlines()), bits)


def refusals(found: list[Line | Unfit | None]) -> list[tuple[int, str | None, str, int]]:
    return [
        (each.number, each.refusal.custom_id, each.refusal.code, each.refusal.status)
        for each in found
        if isinstance(each, Unfit)
    ]


def test_good_lines_become_jobs_whatever_stands_beside_them(tokenizer: Tokenizer) -> None:
    rows = [
        orjson.dumps(line("a", (1, 2))),
        b"",
        b"{not json",
        orjson.dumps([1]),
        orjson.dumps({**line("b", (1,)), "url": "/v1/embeddings"}),
        orjson.dumps(line("c", (1,), stream=True)),
        orjson.dumps(line("a", (3,))),
        b'{"custom_id": "\xff"}',
        orjson.dumps(line("d", (1,), model="other")),
        orjson.dumps(line("e", (1,), max_tokens=5000)),
        orjson.dumps(line("f", (5, 6, 7))) + b"\r",
    ]
    read = reader(tokenizer, b"\n".join(rows))
    found = list(read)
    assert read.exhausted
    good = [each for each in found if isinstance(each, Line)]
    assert [(each.number, each.custom_id, each.parts[0].prompt_ids) for each in good] == [
        (0, "a", (1, 2)),
        (10, "f", (5, 6, 7)),
    ]
    assert refusals(found) == [
        (2, None, "invalid_json", 0),
        (3, None, "invalid_line", 0),
        (4, "b", "invalid_url", 0),
        (5, "c", "invalid_value", 400),
        (6, None, "duplicate_custom_id", 0),
        (7, None, "invalid_json", 0),
        (8, "d", "model_not_found", 404),
        (9, "e", "context_length_exceeded", 400),
    ]


def test_lines_that_are_done_are_passed_over_but_their_ids_are_taken(tokenizer: Tokenizer) -> None:
    rows = [line("a", (1,)), line("b", (2,)), line("a", (3,)), line("b", (4,))]
    found = list(reader(tokenizer, jsonl(rows), 0, 2))
    assert [each.number if isinstance(each, Line) else None for each in found] == [None, 1, None, None]
    assert refusals(found) == [(3, None, "duplicate_custom_id", 0)]


def test_of_lines_with_one_id_the_first_has_it_also_when_it_is_refused(tokenizer: Tokenizer) -> None:
    rows: list[dict[str, Any]] = [{**line("a", (1,)), "method": "GET"}, line("a", (1,))]
    assert refusals(list(reader(tokenizer, jsonl(rows)))) == [
        (0, "a", "invalid_method", 0),
        (1, None, "duplicate_custom_id", 0),
    ]


def test_when_nothing_is_run_any_more_good_lines_are_told_why_and_bad_ones_what_is_wrong(tokenizer: Tokenizer) -> None:
    read = reader(tokenizer, jsonl([line("a", (1,)), line("b", (2,)), line("b", (2,)), {}]))
    assert isinstance(next(read), Line)
    read.run_no_more("batch_cancelled", "no more")
    assert refusals(list(read)) == [
        (1, "b", "batch_cancelled", 0),
        (2, None, "duplicate_custom_id", 0),
        (3, None, "missing_custom_id", 0),
    ]


def test_a_line_without_a_seed_gets_the_same_one_whoever_reads_it(tokenizer: Tokenizer) -> None:
    content = jsonl([line("a", (1,)), line("b", (1,)), line("c", (1,), seed=5)])
    seeds = [
        [each.parts[0].sampling.seed for each in reader(tokenizer, content) if isinstance(each, Line)] for _ in range(2)
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert spare_seed("a", 1) != spare_seed("b", 1)


def test_what_the_fleet_can_hold_is_what_a_line_may_take(tokenizer: Tokenizer) -> None:
    found = list(reader(tokenizer, jsonl([line("a", (1, 2, 3), max_tokens=8)]), limit=10))
    assert refusals(found) == [(0, "a", "context_length_exceeded", 400)]
