"""A walk along everything that OpenAI and vLLM document for a request: each thing has an effect, or is refused by its
name. Nothing is accepted and ignored.

OpenAI's side is read from the types of the installed client, so a parameter that a new version brings fails here until
somebody has decided about it.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params
from openai.types.chat import chat_completion_assistant_message_param, chat_completion_content_part_param
from openai.types.chat import completion_create_params as chat_create_params

from prelay_text.errors import RequestError
from prelay_text.parameters import PARAMETERS, Route, parameters_of
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.validate import chat_request, completion_request

READERS: dict[Route, Callable[[object], CompletionRequest | ChatRequest]] = {
    Route.COMPLETION: completion_request,
    Route.CHAT: chat_request,
}
BODIES: dict[Route, dict[str, Any]] = {
    Route.COMPLETION: {"model": "m", "prompt": "p"},
    Route.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
OPENAI: dict[Route, dict[str, Any]] = {
    Route.COMPLETION: get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
    Route.CHAT: get_type_hints(chat_create_params.CompletionCreateParamsStreaming),
}
#: What vLLM documents beside OpenAI's parameters, with a value that asks for something.
VLLM_BOTH: dict[str, Any] = {
    "add_special_tokens": None,  # its default depends on the route: see below
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "cache_salt": "x",
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 0.5,
    "logprob_token_ids": [1],
    "min_p": 0.5,
    "min_tokens": 2,
    "priority": 1,
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 3},
    "repetition_penalty": 1.5,
    "request_id": "x",
    "response_format": {"type": "json_object"},
    "return_mm_kwargs": False,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "session_id": "x",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [1],
    "stream_interval": 2,
    "structured_outputs": {"regex": "a"},
    "thinking_token_budget": 5,
    "top_k": 5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
VLLM: dict[Route, dict[str, Any]] = {
    Route.COMPLETION: {**VLLM_BOTH, "add_special_tokens": False, "prompt_embeds": "x"},
    Route.CHAT: {
        **VLLM_BOTH,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template": "x",
        "chat_template_kwargs": {"enable_thinking": True},
        "continue_final_message": True,
        "documents": [{"text": "x"}],
        "include_reasoning": False,
        "media_io_kwargs": {"image": {}},
        "mm_processor_kwargs": {"a": 1},
        "return_prompt_text": True,
    },
}
#: Accepted, checked, and told in the documentation to change nothing.
WITHOUT_EFFECT = {"user", "metadata"}
#: What a parameter needs beside it to ask for something.
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "continuous_usage_stats": {"include_usage": True},
    "add_generation_prompt": {},
}


# --- values that a type allows


def values_of(hint: Any) -> list[Any]:
    """Some values of the type that ask for something, as JSON has them; at least one."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return [value for each in get_args(hint) if each is not type(None) for value in values_of(each)]
    if origin is Literal:
        return list(get_args(hint))
    if hasattr(hint, "__total__"):  # a TypedDict, of typing or of typing_extensions
        return [_object_of(hint)]
    if origin in (dict, Mapping) or hint is dict:
        return [{"1": values_of(get_args(hint)[1])[0]} if get_args(hint) else {"a": 1}]
    if origin is not None:  # lists and whatever may be given instead of them
        return [[value] for value in values_of(get_args(hint)[0])]
    plain: dict[Any, list[Any]] = {bool: [True, False], int: [2], float: [0.5], str: ["x"]}
    return plain.get(hint, [{"a": 1}])


def _object_of(hint: Any) -> dict[str, Any]:
    """The required fields, and all when none is."""
    fields = get_type_hints(hint)
    return {name: values_of(fields[name])[0] for name in _required(hint) or fields}


def _required(hint: Any) -> list[str]:
    marked = get_type_hints(hint, include_extras=True)
    return [name for name, field in marked.items() if get_origin(field) is Required]


def read(route: Route, body: dict[str, Any]) -> ChatRequest | CompletionRequest | RequestError:
    """The request, or why it is none."""
    try:
        return READERS[route](body)
    except RequestError as error:
        return error


def verdict(route: Route, name: str, value: Any, **companions: Any) -> str:
    """What becomes of one parameter with this value: "changes" the request, is "refused" by its name, or "nothing"."""
    body = {**BODIES[route], **companions}
    found = read(route, {**body, name: value})
    if not isinstance(found, RequestError):
        return "changes" if found != READERS[route](body) else "nothing"
    assert found.status == 400
    assert found.param is not None
    assert found.param.startswith(name) or found.param.endswith(name), (found.param, found.message)
    assert name in found.message
    return "refused"


# --- parameters


def documented() -> Iterable[Any]:
    for route in (Route.COMPLETION, Route.CHAT):
        for name, hint in OPENAI[route].items():
            yield pytest.param(route, name, values_of(hint), id=f"openai-{route.name}-{name}")
        for name, value in VLLM[route].items():
            yield pytest.param(route, name, [value], id=f"vllm-{route.name}-{name}")


@pytest.mark.parametrize(("route", "name", "values"), [*documented()])
def test_every_documented_parameter_has_an_effect_or_is_refused_by_name(
    route: Route, name: str, values: list[Any]
) -> None:
    assert name in parameters_of(route), f"{name} is in no row of the table: implement it or refuse it, with a reason"
    found = {verdict(route, name, value, **COMPANIONS.get(name, {})) for value in values}
    assert found - {"nothing"}, f"{name} is accepted and ignored: {values}"


@pytest.mark.parametrize("route", READERS)
def test_what_is_refused_is_refused_with_its_own_reason(route: Route) -> None:
    examples: dict[str, list[Any]] = {name: values_of(hint) for name, hint in OPENAI[route].items()}
    examples |= {name: [value] for name, value in VLLM[route].items()}
    for name, row in parameters_of(route).items():
        if row.check is not None:
            continue
        assert name in examples, f"{name} is refused and nobody documents it"
        value = next(value for value in examples[name] if not row.is_neutral(value))
        with pytest.raises(RequestError, match=f"^{name} is not implemented: ") as caught:
            READERS[route]({**BODIES[route], name: value})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        for neutral in (None, *row.neutral):
            assert verdict(route, name, neutral) == "nothing", f"{name}: {neutral!r}"


def test_no_parameter_has_two_rows_on_one_route() -> None:
    for route in READERS:
        names = Counter(row.name for row in PARAMETERS if route in row.route)
        assert [name for name, count in names.items() if count > 1] == []


# --- stream_options


@pytest.mark.parametrize("route", READERS)
@pytest.mark.parametrize(
    "field",
    sorted({*get_type_hints(chat_types.ChatCompletionStreamOptionsParam), "include_usage", "continuous_usage_stats"}),
)
def test_every_documented_option_of_a_stream_has_an_effect_or_is_refused_by_name(route: Route, field: str) -> None:
    body = {**BODIES[route], "stream": True}
    companions = COMPANIONS.get(field, {})
    found = read(route, {**body, "stream_options": {**companions, field: True}})
    if isinstance(found, RequestError):
        assert found.param == f"stream_options.{field}"
        assert f"{found.param} is not implemented: " in found.message
    else:
        assert found != read(route, {**body, "stream_options": companions}), f"{field} is accepted and ignored"


# --- messages

MESSAGES = {
    role: hint
    for hint in get_args(chat_types.ChatCompletionMessageParam)
    for role in get_args(get_type_hints(hint)["role"])
}
PARTS = [
    *get_args(chat_completion_content_part_param.ChatCompletionContentPartParam),
    *get_args(chat_completion_assistant_message_param.ContentArrayOfContentPart),
]
FIELDS = [
    pytest.param(role, name, values_of(field), id=f"{role}-{name}")
    for role, hint in MESSAGES.items()
    for name, field in get_type_hints(hint).items()
    if name not in ("role", "content")
]


def spoken(message: dict[str, Any]) -> str:
    """ "taken", or the parameter that a refusal of a chat with this message names."""
    found = read(Route.CHAT, {"model": "m", "messages": [message]})
    if not isinstance(found, RequestError):
        return "taken"
    assert found.param is not None
    assert found.param in found.message
    return found.param


@pytest.mark.parametrize("role", MESSAGES)
def test_every_documented_role_is_taken_or_refused_by_name(role: str) -> None:
    needed = {name: value for name, value in _object_of(MESSAGES[role]).items() if name not in ("role", "content")}
    found = spoken({"role": role, "content": "x", **needed})
    assert found in ("taken", "messages[0].role", *(f"messages[0].{name}" for name in needed))
    assert (found == "taken") == (role in ("system", "developer", "user", "assistant"))


@pytest.mark.parametrize(("role", "name", "values"), FIELDS)
def test_every_documented_field_of_a_message_has_an_effect_or_is_refused_by_name(
    role: str, name: str, values: list[Any]
) -> None:
    message = {"role": role, "content": "x"}
    if spoken(message) != "taken":
        return  # the role is refused, which the test above holds
    for value in values:
        found = spoken({**message, name: value})
        if found == "taken":
            one, other = (chat_request({"model": "m", "messages": [m]}) for m in (message, {**message, name: value}))
            assert one.messages != other.messages, f"{name} is accepted and ignored"
        else:
            assert found == f"messages[0].{name}"


@pytest.mark.parametrize("hint", PARTS, ids=lambda hint: str(hint.__name__))
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_every_documented_part_of_a_content_is_text_or_refused_by_name(role: str, hint: Any) -> None:
    part = _object_of(hint)
    found = spoken({"role": role, "content": [part]})
    assert found == ("taken" if part["type"] == "text" else "messages[0].content[0].type")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (name, values_of(hint))
        for name, hint in get_type_hints(chat_types.ChatCompletionContentPartTextParam).items()
        if name not in ("type", "text")
    ],
)
def test_every_documented_field_of_a_text_part_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        part = {"type": "text", "text": "x", name: value}
        assert spoken({"role": "user", "content": [part]}) == f"messages[0].content[0].{name}"
