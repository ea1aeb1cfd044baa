from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.job import Priority
from prelay_text import refusals
from prelay_text.errors import RequestError
from prelay_text.parameters import MAX_STOP_CHARS, PARAMETERS, Route, parameters_of
from prelay_text.request import ChatRequest, CompletionRequest, Message, StreamOptions
from prelay_text.validate import chat_request, completion_request

USER = {"role": "user", "content": "hi"}


def completion(**values: Any) -> CompletionRequest:
    return completion_request({"model": "m", "prompt": "p", **values})


def chat(**values: Any) -> ChatRequest:
    return chat_request({"model": "m", "messages": [USER], **values})


def refusal(call: Any, **values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(**values)
    error = caught.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.param
    assert error.code
    return error


def test_the_smallest_requests_have_the_defaults() -> None:
    assert completion() == CompletionRequest(model="m", prompts=("p",))
    assert chat() == ChatRequest(model="m", messages=(Message("user", "hi"),))


def test_everything_that_is_implemented_arrives() -> None:
    request = completion(
        prompt=[1, 2], max_tokens=7, n=3, temperature=0, top_p=0.5, top_k=4, seed=-5, stop=["a", "b", "a"],
        stop_token_ids=[9], ignore_eos=True, stream=True, stream_options={"include_usage": True}, user="u",
        metadata={"k": "v"}, min_p=0.1, min_tokens=3, repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2,
        logit_bias={"5": -100, "7": 0.5}, bad_words="x",
    )  # fmt: skip
    assert request == CompletionRequest(
        model="m", prompts=((1, 2),), max_tokens=7, n=3, temperature=0.0, top_p=0.5, top_k=4, seed=-5, stop=("a", "b"),
        stop_token_ids=(9,), ignore_eos=True, stream=True, stream_options=StreamOptions(True), user="u",
        metadata={"k": "v"}, min_p=0.1, min_tokens=3, repetition_penalty=1.1, presence_penalty=-2.0,
        frequency_penalty=2.0, logit_bias=((5, -100.0), (7, 0.5)), bad_words=("x",),
    )  # fmt: skip


def test_null_means_the_default() -> None:
    nothing = {name: None for name, row in parameters_of(Route.COMPLETION).items() if not row.required}
    assert completion(**nothing) == completion()
    nothing = {name: None for name, row in parameters_of(Route.CHAT).items() if not row.required}
    assert chat(**nothing) == chat()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", None, "model must be a string"),
        ("model", "", "of 1 to 512 characters, not of 0"),
        ("prompt", None, "a string, a list of token ids, or a list of such prompts, not null"),
        ("prompt", [], "a string or a non-empty list"),
        ("prompt", ["a", [1]], "prompt[1] must be a string, as the first prompt is, not list [1]"),
        ("prompt", [[1], "a"], "prompt[1] must be a list of token ids, as the first prompt is, not str 'a'"),
        ("prompt", [[1], []], "prompt[1] must be a non-empty list of token ids"),
        ("prompt", [[1], [2, "x"]], "prompt[1][1] must be a token id (an integer), not str 'x'"),
        ("prompt", ["a"] * 129, "prompt may have up to 128 entries, not 129"),
        ("prompt", [1.5], "prompt[0] must be a token id (an integer), not float 1.5"),
        ("prompt", [1, True], "prompt[1] must be a token id (an integer), not bool True"),
        ("prompt", [1, "a"], "prompt[1]"),
        ("prompt", {"a": 1}, "prompt must be"),
        ("prompt", "a\ud800", "half of a surrogate pair at character 1"),
        ("max_tokens", 0, "max_tokens is 0, which asks for nothing unless echo is true"),
        ("max_tokens", -1, "an integer of at least 0, not -1"),
        ("max_tokens", 1.0, "an integer of at least 0, not float 1.0"),
        ("max_tokens", True, "not bool True"),
        ("max_tokens", "5", "not str '5'"),
        ("n", 0, "an integer from 1 to 128, not 0"),
        ("n", 129, "an integer from 1 to 128, not 129"),
        ("best_of", 129, "an integer from 1 to 128, not 129"),
        ("echo", 1, "true or false, not int 1"),
        ("temperature", -0.1, "a number from 0 to 2, not -0.1"),
        ("temperature", 2.1, "a number from 0 to 2, not 2.1"),
        ("temperature", math.nan, "a number from 0 to 2, not nan"),
        ("temperature", math.inf, "a number from 0 to 2, not inf"),
        ("temperature", 10**400, "a number from 0 to 2"),
        ("temperature", 10**9000, "a huge int"),
        ("temperature", False, "not bool False"),
        ("temperature", "1", "not str '1'"),
        ("top_p", 0, "a number above 0 and at most 1, not 0"),
        ("top_p", 1.01, "a number above 0 and at most 1, not 1.01"),
        ("top_k", -2, "an integer from -1 to"),
        ("seed", 2**64, "an integer from -9223372036854775808 to 18446744073709551615"),
        ("seed", 1.5, "not float 1.5"),
        ("stop", "", "stop must be a string of 1 to 512 characters, not of 0"),
        ("stop", ["a", ""], "stop[1] must be a string of 1 to 512 characters, not of 0"),
        ("stop", "x" * (MAX_STOP_CHARS + 1), "of 1 to 512 characters, not of 513"),
        ("stop", ["x"] * 17, "stop may have up to 16 entries, not 17"),
        ("stop", [1], "stop[0] must be a string"),
        ("stop", 5, "a string or a list of up to 16 strings"),
        ("stop_token_ids", [1.5], "stop_token_ids[0] must be a token id"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", [1] * 65, "up to 64 entries, not 65"),
        ("ignore_eos", 1, "true or false, not int 1"),
        ("stream", "true", "true or false, not str 'true'"),
        ("stream_options", True, "stream_options must be an object"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage must be true or false"),
        ("stream_options", {"other": 1}, "stream_options.other is not a known option"),
        ("stream_options", {"include_obfuscation": True}, "include_obfuscation is not implemented"),
        ("priority", 1, "priority must be one of interactive, normal, batch, not int 1"),
        ("priority", "urgent", "one of interactive, normal, batch, not 'urgent'"),
        ("user", 5, "user must be a string"),
        ("metadata", [], "metadata must be an object of strings"),
        ("metadata", {"k": 1}, "metadata.k must be a string"),
        ("metadata", {str(i): "" for i in range(17)}, "up to 16 entries, not 17"),
        ("min_p", 1.1, "a number from 0 to 1, not 1.1"),
        ("min_tokens", -1, "an integer of at least 0, not -1"),
        ("repetition_penalty", 0, "a number above 0 and at most 10, not 0"),
        ("presence_penalty", 2.5, "a number from -2 to 2, not 2.5"),
        ("frequency_penalty", -3, "a number from -2 to 2, not -3"),
        ("logit_bias", [], "an object of numbers by token id, not list"),
        ("logit_bias", {"5": 101}, "logit_bias.5 must be a number from -100 to 100, not 101"),
        ("logit_bias", {"5": "1"}, "logit_bias.5 must be a number from -100 to 100, not str '1'"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "up to 1024 entries, not 1025"),
        ("bad_words", ["x"] * 65, "up to 64 entries, not 65"),
        ("bad_words", [""], "bad_words[0] must be a string of 1 to 512 characters, not of 0"),
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) or value < 2**64 else "huge",
)
def test_a_wrong_value_is_named_with_its_limit(name: str, value: object, words: str) -> None:
    error = refusal(completion, **{name: value})
    assert words in error.message
    assert error.param is not None
    assert error.param.startswith(name)


REFUSED = {
    "suffix": "x", "tools": [{"type": "function"}], "tool_choice": "required",
    "parallel_tool_calls": False, "functions": [{}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "modalities": ["text", "audio"], "audio": {}, "prediction": {},
    "reasoning_effort": "low", "verbosity": "low", "web_search_options": {}, "moderation": {}, "store": True,
    "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
}  # fmt: skip


def test_every_refused_row_has_an_example_below() -> None:
    of_vllm = {row[0] for row in (*refusals.OF_BOTH, *refusals.OF_COMPLETIONS, *refusals.OF_CHATS)}
    assert {row.name for row in PARAMETERS if row.check is None} - of_vllm == set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_implemented_is_refused_by_name_unless_neutral(name: str) -> None:
    for route, call in ((Route.COMPLETION, completion), (Route.CHAT, chat)):
        row = parameters_of(route).get(name)
        if row is None:
            assert refusal(call, **{name: None}).code == "unknown_parameter"
            continue
        error = refusal(call, **{name: REFUSED[name]})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert f"{name} is not implemented" in error.message
        assert [call(**{name: value}) for value in (None, *row.neutral)] == [call()] * (1 + len(row.neutral))


@pytest.mark.parametrize("key", ["", "-1", "x", "1.0", "07", "00", "12345678901"])
def test_a_bias_is_for_a_token_id(key: str) -> None:
    error = refusal(completion, logit_bias={key: 1})
    assert error.param == "logit_bias"
    assert "a key of logit_bias" in error.message
    assert "must be a token id" in error.message


def test_zero_is_not_false() -> None:
    assert refusal(completion, logprobs=False).param == "logprobs"
    assert refusal(completion, presence_penalty=False).param == "presence_penalty"
    assert refusal(completion, echo=0).param == "echo"


def test_an_unknown_parameter_is_refused_as_unknown() -> None:
    error = refusal(completion, guided_regex="(a+)+$")
    assert (error.param, error.code) == ("guided_regex", "unknown_parameter")
    assert refusal(completion, messages=[USER]).code == "unknown_parameter"
    assert refusal(chat, prompt="x").code == "unknown_parameter"


@pytest.mark.parametrize("body", [None, [], "x", 1, [{"model": "m"}]])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    for parse in (completion_request, chat_request):
        with pytest.raises(RequestError, match="must be a JSON object"):
            parse(body)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_what_is_missing_is_named(missing: str) -> None:
    body = {"model": "m", "messages": [USER]}
    del body[missing]
    with pytest.raises(RequestError, match=f"{missing} is missing") as caught:
        chat_request(body)
    assert (caught.value.param, caught.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages must be a list of messages, not null"),
        ([], "a non-empty list of messages"),
        ({}, "a list of messages, not dict"),
        (["hi"], "messages[0] must be an object with role and content"),
        ([{"role": "user"}], "messages[0].content must be a string or a list of text parts, not null"),
        ([{"role": "user", "content": None}], "messages[0].content must be a string or a list of text parts"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list of text parts"),
        ([{"role": "user", "content": []}], "a non-empty list of text parts"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' is not implemented"),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].role 'tool' is not implemented"),
        ([{"role": "king", "content": "x"}], "one of system, developer, user, assistant, not 'king'"),
        ([{"content": "x"}], "messages[0].role must be one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role must be one of"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls is not implemented"),
        ([{**USER, "name": 5}], "messages[0].name must be a string"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content holds half of a surrogate pair"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "half of a surrogate pair"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_wrong_message_is_named_by_its_place(messages: object, words: str) -> None:
    error = refusal(chat, messages=messages)
    assert words in error.message
    assert error.param is not None
    assert error.param.startswith("messages")


def test_text_parts_are_joined_and_a_returned_message_is_taken_back() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": None}]
    returned: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    request = chat(messages=[{"role": "system", "content": parts, "name": "n"}, returned])
    assert request.messages == (Message("system", "a\nb", "n"), Message("assistant", "x"))
    assert request.messages[0].as_dict() == {"role": "system", "content": "a\nb", "name": "n"}


def test_the_newer_name_of_max_tokens_counts_in_a_chat() -> None:
    assert chat(max_completion_tokens=5).max_tokens == chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert "5 and max_completion_tokens 6 disagree" in refusal(chat, max_completion_tokens=6, max_tokens=5).message
    assert refusal(completion, max_completion_tokens=5).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (None, False), ({}, False), ({"include_usage": None}, False), ({"include_usage": False}, False),
        ({"include_usage": True}, True), ({"include_usage": True, "include_obfuscation": False}, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_usage_is_included_only_when_asked_for(options: object, wanted: bool, stream: bool) -> None:
    assert completion(stream_options=options, stream=stream).stream_options == StreamOptions(wanted)
    assert completion().stream_options == StreamOptions()


def test_both_ways_to_switch_top_k_off_are_one() -> None:
    assert completion(top_k=-1).top_k == completion(top_k=0).top_k == 0


LONG = "x" * 100_000
#: Something of the wrong kind, and endless, wherever a name or a value may be repeated in an error.
ENDLESS: list[Any] = [
    LONG, [LONG], {LONG: LONG}, [{LONG: LONG}], {"include_usage": True, LONG: 1}, int("9" * 400),
    [{"role": "user", "content": "a", LONG: 1}], [{"role": LONG, "content": "a"}],
    [{"role": "user", "content": [LONG]}], [{"role": "user", "content": [{"type": LONG}]}],
    [{"role": "user", "content": [{"type": "text", LONG: 1}]}],
    [{"role": "user", "content": [{"type": "text", "text": [LONG]}]}],
    [{"role": "user", "content": "a", "name": LONG}],
]  # fmt: skip


def repeated(call: Any, **parameters: Any) -> tuple[int, int]:
    """Characters of the refusal's message and of the parameter that it names; none where nothing is refused."""
    try:
        call(**parameters)
    except RequestError as error:
        return len(error.message), len(error.param or "")
    return 0, 0


@pytest.mark.parametrize("value", ENDLESS, ids=range(len(ENDLESS)))
@pytest.mark.parametrize("call", [completion, chat])
def test_an_error_repeats_no_more_of_a_request_than_can_be_read(call: Any, value: Any) -> None:
    for name in (LONG, *(row.name for row in PARAMETERS)):
        words, param = repeated(call, **{name: value})
        assert words < 400, name
        assert param < 120, name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(values=st.dictionaries(st.sampled_from([row.name for row in PARAMETERS]), json_values, max_size=4))
def test_any_json_is_a_request_or_a_clear_refusal(values: dict[str, Any]) -> None:
    for parse in (completion_request, chat_request):
        assert answer_to(parse, values) in (CompletionRequest, ChatRequest, 400)


def answer_to(parse: Any, values: dict[str, Any]) -> object:
    """The kind of request, or the status of a refusal that says something."""
    try:
        return type(parse(values))
    except RequestError as error:
        return error.status if error.message and error.code else error


@pytest.mark.parametrize("name", ["interactive", "normal", "batch"])
def test_a_request_says_its_class_by_name(name: str) -> None:
    assert completion(priority=name).priority is chat(priority=name).priority is Priority(name)
    assert completion().priority is Priority.NORMAL


@pytest.mark.parametrize(
    ("tier", "priority"),
    [("auto", "normal"), ("default", "normal"), ("priority", "interactive"), ("flex", "batch")],
)
def test_openai_s_service_tiers_are_classes(tier: str, priority: str) -> None:
    assert chat(service_tier=tier).priority is Priority(priority)


def test_a_service_tier_that_says_nothing_leaves_the_class_and_one_that_says_another_is_refused() -> None:
    assert chat(service_tier="auto", priority="batch").priority is Priority.BATCH
    assert chat(service_tier="flex", priority="batch").priority is Priority.BATCH
    assert "disagree" in refusal(chat, service_tier="priority", priority="batch").message
    assert "one of auto, default, priority, flex" in refusal(chat, service_tier="scale").message
    assert refusal(completion, service_tier="flex").code == "unknown_parameter"


def test_the_best_of_more_candidates_are_shown_at_the_end_only() -> None:
    assert (completion().candidates, completion(n=3).candidates, completion(n=2, best_of=5).candidates) == (1, 3, 5)
    assert "best_of must be at least n, which is 3, not 2" in refusal(completion, n=3, best_of=2).message
    error = refusal(completion, n=1, best_of=2, stream=True)
    assert (error.param, "stream must be false" in error.message) == ("best_of", True)
    assert completion(n=2, best_of=2, stream=True).candidates == 2


@pytest.mark.parametrize(("values", "param"), [({"n": 65}, "n"), ({"best_of": 65}, "best_of")])
def test_the_choices_of_all_prompts_together_are_limited(values: dict[str, int], param: str) -> None:
    error = refusal(completion, prompt=["a", "b"], **values)
    assert error.param == param
    assert f"2 prompts with {param} 65 are 130 choices, more than 128" in error.message
    assert completion(prompt=["a", "b"], n=64).candidates == 64


def test_prompts_may_be_texts_or_lists_of_ids() -> None:
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)


def test_an_answer_may_be_left_out_where_the_prompt_is_repeated() -> None:
    assert completion(echo=True, max_tokens=0).prompt_only
    assert not completion(echo=True, max_tokens=1).prompt_only
    assert refusal(completion, max_tokens=0).param == "max_tokens"


def test_usage_in_every_chunk_needs_usage_at_all() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).stream_options == StreamOptions(True, True)
    error = refusal(chat, stream=True, stream_options={"continuous_usage_stats": True})
    assert error.param == "stream_options.continuous_usage_stats"
    assert "stream_options.include_usage must be true for it" in error.message


def test_a_chat_begins_a_message_or_goes_on_with_the_last() -> None:
    assert chat().add_generation_prompt
    assert not chat(add_generation_prompt=False).add_generation_prompt
    going_on = chat(continue_final_message=True)
    assert (going_on.add_generation_prompt, going_on.continue_final_message) == (False, True)
    error = refusal(chat, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "raise_exception"])
def test_a_template_argument_cannot_take_a_name_of_the_server(name: str) -> None:
    error = refusal(chat, chat_template_kwargs={name: 1})
    assert error.param == f"chat_template_kwargs.{name}"
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}
    assert "a name that a template can read" in refusal(chat, chat_template_kwargs={"a b": 1}).message


def test_the_tier_is_kept_as_it_was_named() -> None:
    assert (chat(service_tier="flex").service_tier, chat(service_tier="flex").priority) == ("flex", Priority.BATCH)
    assert (chat(service_tier="auto").priority, chat().service_tier) == (Priority.NORMAL, None)
