"""A whole answer is what a stream of the same tokens adds up to, whatever was asked for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_queue.job import FinishReason
from prelay_queue.note import Note, TokenLogprobs
from prelay_text.errors import RequestError
from prelay_text.form import Form, form_of
from prelay_text.render import Part
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.resolve import Limits, resolve
from prelay_text.template import ChatTemplate
from prelay_text.tokenizer import Tokenizer
from prelay_text.validate import chat_request, completion_request
from prelay_text.whole import Answer, renderer_of, whole_body
from tests.unit.text.families import BACKENDS, SPECIALS


def _tokenizer(name: str) -> Tokenizer:
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    return Tokenizer(BACKENDS[name](), context_len=64, eos_ids=[SPECIALS.index("</s>")], template=template)


TOKENIZERS = {name: _tokenizer(name) for name in ("byte_level", "llama")}
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 6),
    "stop": st.sampled_from([None, "e", ["th", " "], "\ufffd"]),
    "skip_special_tokens": st.booleans(),
    "min_tokens": st.just(1),
    "return_token_ids": st.booleans(),
    "prompt_logprobs": st.none() | st.integers(0, 2),
}
COMPLETION = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.sampled_from(["the dog", ["a", "日本"], [5, 6]])},
    optional=SHARED
    | {
        "echo": st.booleans(),
        "logprobs": st.none() | st.integers(0, 2),
        "n": st.integers(1, 2),
        "best_of": st.integers(2, 3),
    },
)
CHAT = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.just([{"role": "user", "content": "hi"}])},
    optional=SHARED | {"logprobs": st.booleans(), "n": st.integers(1, 3), "service_tier": st.just("auto")},
)


def forms_of(tokenizer: Tokenizer, body: dict[str, Any]) -> list[Form]:
    request: CompletionRequest | ChatRequest
    request = chat_request(body) if "messages" in body else completion_request(body)
    renderer = renderer_of(request, id="r", created=1, model="m", system_fingerprint="fp")
    parts = resolve(request, tokenizer, Limits(64), spare_seed=0)
    return [form_of(request, part, renderer, tokenizer) for part in parts]


def note(data: st.DataObject, prompt: int, token: int, first: bool) -> str:
    own = TokenLogprobs(-token / 8, 1, ((token, -token / 8), (3, -9.0)))
    told = tuple(TokenLogprobs(-1.5, 2, ((4, -0.5), (5, -1.5))) for _ in range(prompt - 1)) if first else ()
    return Note(own, told, cached=data.draw(st.integers(0, prompt)) if first else 0).encode()


def answer(data: st.DataObject, tokenizer: Tokenizer, form: Form) -> Answer:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=6))
    notes = [note(data, form.prompt_tokens, token, seq == 0) for seq, token in enumerate(ids)]
    return Answer(ids, notes, data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])))


def streamed(tokenizer: Tokenizer, form: Form, said: Answer) -> Part:
    """The answer as a client puts its chunks together, which come token by token."""
    assembler, reporter, whole, done = form.assembler(tokenizer), form.reporter(tokenizer), Part(""), 0
    if reporter is not None:
        whole = Part("", ())

    def part(text: str) -> Part:
        nonlocal done
        since, done = done, assembler.delivered
        ids = said.ids[since:done]
        return Part(text, None if reporter is None else reporter.push(ids, said.notes[since:done]), tuple(ids))

    for token in said.ids:
        delta = assembler.push([token])
        whole += part(delta.text if delta else "")
    return whole + part(assembler.finish(said.reason).text)


@settings(deadline=None)
@given(data=st.data(), body=COMPLETION | CHAT, name=st.sampled_from(sorted(TOKENIZERS)))
def test_a_whole_answer_is_what_its_stream_adds_up_to(data: st.DataObject, body: dict[str, Any], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    try:
        forms = forms_of(tokenizer, body)
    except RequestError:
        return
    answers = [answer(data, tokenizer, form) for form in forms]
    found = orjson.loads(whole_body(tokenizer, forms, answers)[0])
    groups = len(forms) // forms[0].candidates
    assert [choice["index"] for choice in found["choices"]] == list(range(groups * forms[0].n))
    usage = found["usage"]
    assert usage["completion_tokens"] == sum(len(said.ids) for said in answers)
    assert usage["prompt_tokens"] == sum(form.prompt_tokens for form in forms[:: forms[0].candidates])
    cached = sum(said.first_note.cached for said in answers[:: forms[0].candidates])
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
    if forms[0].candidates > forms[0].n:
        return
    for choice, form, said in zip(found["choices"], forms, answers, strict=True):
        part = streamed(tokenizer, form, said)
        text = choice["message"]["content"] if "messages" in body else choice["text"]
        before = form.echo.text if form.echo else ""
        assert text == before + part.text
        assert choice["finish_reason"] == said.reason
        if "messages" not in body and part.reports is not None:
            told = [report.offset for report in part.reports]
            assert choice["logprobs"]["text_offset"][-len(told) :] == told
        if form.renderer.token_ids:
            assert choice["token_ids"] == list(said.ids)


def test_of_candidates_the_likeliest_are_shown_and_all_are_counted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    forms = forms_of(tokenizer, {"model": "m", "prompt": ["a", "b"], "n": 1, "best_of": 3, "max_tokens": 1})
    likely = [-3.0, -1.0, -2.0, -0.5, -4.0, -5.0]
    answers = [
        Answer([40 + at], [Note(TokenLogprobs(each, 1)).encode()], FinishReason.LENGTH)
        for at, each in enumerate(likely)
    ]
    found = orjson.loads(whole_body(tokenizer, forms, answers)[0])
    texts = [tokenizer.decode([40 + at]) for at in (1, 3)]
    assert [choice["text"] for choice in found["choices"]] == texts
    assert found["usage"]["completion_tokens"] == 6


def test_of_a_prompt_alone_no_answer_is_shown_or_counted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    forms = forms_of(tokenizer, {"model": "m", "prompt": "the dog", "max_tokens": 0, "echo": True})
    found = orjson.loads(whole_body(tokenizer, forms, [Answer([50], (), FinishReason.STOP)])[0])
    assert found["choices"][0] == {"index": 0, "text": "the dog", "logprobs": None, "finish_reason": "length"}
    assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("asked", "told"), [("auto", "default"), ("flex", "flex")])
def test_the_tier_that_is_told_is_never_auto(asked: str, told: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "service_tier": asked}
    forms = forms_of(TOKENIZERS["byte_level"], body)
    found = orjson.loads(whole_body(TOKENIZERS["byte_level"], forms, [Answer([50], (), FinishReason.STOP)])[0])
    assert found["service_tier"] == told
