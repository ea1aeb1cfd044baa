"""Every parameter of a request, once: its check and default, or the reason why it is refused.

A refused parameter is tolerated when it is null or says what would happen anyway (its neutral values),
because clients send defaults along. A name that is not in the table is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType
from typing import Any

from prelay_queue.job import Priority

from . import checks, messages, refusals
from .checks import Check
from .request import MAX_CHOICES, StreamOptions


class Route(Flag):
    """The kind of request a parameter belongs to."""

    COMPLETION = auto()
    CHAT = auto()
    BOTH = COMPLETION | CHAT


#: Stop strings of one request, and characters of each.
MAX_STOPS, MAX_STOP_CHARS = 16, 512
#: Stop token ids of one request.
MAX_STOP_TOKEN_IDS = 64
#: Words that must not come, and tokens whose logits are biased, of one request.
MAX_BAD_WORDS, MAX_BIASES = 64, 1024
#: A logit's bias.
MIN_BIAS, MAX_BIAS = -100, 100
#: Likeliest tokens reported at each position: vLLM's limit.
MAX_LOGPROBS = 20
#: Longest deadline of a request, ms: a day.
MAX_DEADLINE_MS = 86_400_000
#: What OpenAI's tiers come to here: a class, or nothing said.
SERVICE_TIERS = {"auto": None, "default": None, "priority": Priority.INTERACTIVE, "flex": Priority.BATCH}
#: More than this leaves nothing of the logits' order.
MAX_REPETITION_PENALTY = 10
#: Entries of `metadata`, characters of a key and of a value: OpenAI's limits.
MAX_METADATA = (16, 64, 512)
#: Characters of `model` and of `user`.
MAX_NAME_CHARS = 512


@dataclass(frozen=True)
class Parameter:
    """One row. Implemented: `check` is set. Refused: `refusal` says why, in words that follow the name."""

    name: str
    check: Check | None = None
    default: Any = None
    required: bool = False
    refusal: str = ""
    neutral: tuple[Any, ...] = ()
    route: Route = Route.BOTH

    def is_neutral(self, value: object) -> bool:
        """Null, or equal to a neutral value of the same kind (0 is not false)."""
        return value is None or any(
            value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.neutral
        )


def _refused(name: str, why: str, *neutral: Any, route: Route = Route.BOTH) -> Parameter:
    return Parameter(name, refusal=why, neutral=neutral, route=route)


_COMPLETION, _CHAT = Route.COMPLETION, Route.CHAT
_NO_TOOLS = "is not implemented: this server calls no tools"
_NO_STORE = "is not implemented: nothing is kept after the answer"
_TEXT_ONLY = "is not implemented: the models served here read and write text"

PARAMETERS = (
    # Implemented
    Parameter("model", checks.text(1, MAX_NAME_CHARS), required=True),
    Parameter("prompt", messages.prompts, required=True, route=_COMPLETION),
    Parameter("messages", messages.messages, required=True, route=_CHAT),
    Parameter("max_tokens", checks.integer(0), route=_COMPLETION),
    Parameter("max_tokens", checks.integer(1), route=_CHAT),
    Parameter("max_completion_tokens", checks.integer(1), route=_CHAT),
    Parameter("n", checks.integer(1, MAX_CHOICES), 1),
    Parameter("best_of", checks.integer(1, MAX_CHOICES), route=_COMPLETION),
    Parameter("echo", checks.boolean, False, route=_COMPLETION),
    Parameter("temperature", checks.number(0, 2), 1.0),
    Parameter("top_p", checks.number(0, 1, above=True), 1.0),
    Parameter("top_k", checks.integer(-1, 2**31 - 1), 0),
    Parameter("seed", checks.integer(-(2**63), 2**64 - 1)),
    Parameter("stop", checks.one_or_many_texts(MAX_STOPS, MAX_STOP_CHARS), ()),
    Parameter("stop_token_ids", checks.token_ids(MAX_STOP_TOKEN_IDS), ()),
    Parameter("ignore_eos", checks.boolean, False),
    Parameter("min_tokens", checks.integer(0), 0),
    Parameter("min_p", checks.number(0, 1), 0.0),
    Parameter("repetition_penalty", checks.number(0, MAX_REPETITION_PENALTY, above=True), 1.0),
    Parameter("presence_penalty", checks.number(-2, 2), 0.0),
    Parameter("frequency_penalty", checks.number(-2, 2), 0.0),
    Parameter("logit_bias", checks.biases(MAX_BIASES, MIN_BIAS, MAX_BIAS), ()),
    Parameter("bad_words", checks.one_or_many_texts(MAX_BAD_WORDS, MAX_STOP_CHARS), ()),
    Parameter("logprobs", checks.integer(0, MAX_LOGPROBS), route=_COMPLETION),
    Parameter("logprobs", checks.boolean, False, route=_CHAT),
    Parameter("top_logprobs", checks.integer(0, MAX_LOGPROBS), route=_CHAT),
    Parameter("prompt_logprobs", checks.integer(0, MAX_LOGPROBS)),
    Parameter("priority", checks.one_of({priority.value: priority for priority in Priority})),
    Parameter("deadline_ms", checks.integer(1, MAX_DEADLINE_MS)),
    Parameter("service_tier", checks.one_of({tier: tier for tier in SERVICE_TIERS}), route=_CHAT),
    Parameter("stream", checks.boolean, False),
    Parameter("stream_options", messages.stream_options, StreamOptions()),
    Parameter("skip_special_tokens", checks.boolean, True),
    Parameter("return_token_ids", checks.boolean, False),
    Parameter("add_generation_prompt", checks.boolean, route=_CHAT),
    Parameter("continue_final_message", checks.boolean, False, route=_CHAT),
    Parameter("chat_template_kwargs", messages.template_arguments, MappingProxyType({}), route=_CHAT),
    # Accepted without effect
    Parameter("user", checks.text(0, MAX_NAME_CHARS)),
    Parameter("metadata", checks.text_map(*MAX_METADATA), MappingProxyType({})),
    # Refused
    _refused("suffix", "is not implemented: the models served here do not fill in", "", route=_COMPLETION),
    _refused("tools", _NO_TOOLS, [], route=_CHAT),
    _refused("tool_choice", _NO_TOOLS, "none", "auto", route=_CHAT),
    _refused("parallel_tool_calls", _NO_TOOLS, True, route=_CHAT),
    _refused("functions", _NO_TOOLS, [], route=_CHAT),
    _refused("function_call", _NO_TOOLS, "none", "auto", route=_CHAT),
    _refused("response_format", "is not implemented: answers are free text", {"type": "text"}),
    _refused("modalities", _TEXT_ONLY, ["text"], route=_CHAT),
    _refused("audio", _TEXT_ONLY, route=_CHAT),
    _refused("prediction", "is not implemented: there is no speculative decoding", route=_CHAT),
    _refused("reasoning_effort", "is not implemented: thinking is not controlled", route=_CHAT),
    _refused("verbosity", "is not implemented: length is not controlled", "medium", route=_CHAT),
    _refused("web_search_options", "is not implemented: this server searches nothing", route=_CHAT),
    _refused("moderation", "is not implemented: this server moderates nothing", route=_CHAT),
    _refused("store", _NO_STORE, False, route=_CHAT),
    _refused("safety_identifier", "is not implemented: use user", route=_CHAT),
    _refused("prompt_cache_key", "is not implemented: caching takes no hints", route=_CHAT),
    _refused("prompt_cache_options", "is not implemented: caching takes no hints", route=_CHAT),
    _refused("prompt_cache_retention", "is not implemented: caching takes no hints", route=_CHAT),
    *(_refused(*row) for row in refusals.OF_BOTH),
    *(_refused(*row, route=_COMPLETION) for row in refusals.OF_COMPLETIONS),
    *(_refused(*row, route=_CHAT) for row in refusals.OF_CHATS),
)

_BY_ROUTE: Mapping[Route, Mapping[str, Parameter]] = {
    route: {row.name: row for row in PARAMETERS if route in row.route} for route in (_COMPLETION, _CHAT)
}


def parameters_of(route: Route) -> Mapping[str, Parameter]:
    """The rows that a request of this kind may name."""
    return _BY_ROUTE[route]
