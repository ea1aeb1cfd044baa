"""From a parsed JSON body to a request, through the table of parameters."""

from __future__ import annotations

from typing import Any

from prelay_queue.job import Priority

from .checks import show
from .errors import RequestError
from .parameters import SERVICE_TIERS, Parameter, Route, parameters_of
from .request import MAX_CHOICES, ChatRequest, CompletionRequest


def completion_request(body: object) -> CompletionRequest:
    """Check the body of /v1/completions. Raise RequestError for the first parameter that is wrong."""
    values = _values(body, Route.COMPLETION)
    values["priority"] = values["priority"] or Priority.NORMAL
    request = CompletionRequest(prompts=values.pop("prompt"), **_common(values))
    _check_ranked(request)
    _check_count("best_of" if request.best_of else "n", request.candidates, len(request.prompts))
    if request.prompt_only and not request.echo:
        message = "max_tokens is 0, which asks for nothing unless echo is true"
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return request


def chat_request(body: object) -> ChatRequest:
    """Check the body of /v1/chat/completions. Raise RequestError for the first parameter that is wrong."""
    values = _values(body, Route.CHAT)
    newer = values.pop("max_completion_tokens")
    older = values["max_tokens"]
    if newer is not None and older is not None and newer != older:
        message = f"max_tokens {older} and max_completion_tokens {newer} disagree: send one of them"
        raise RequestError(message, param="max_completion_tokens", code="invalid_value")
    values["max_tokens"] = older if newer is None else newer
    if values["top_logprobs"] and not values["logprobs"]:
        message = f"top_logprobs is {values['top_logprobs']}, but logprobs must be true for it"
        raise RequestError(message, param="top_logprobs", code="invalid_value")
    values["priority"] = _class(values["priority"], values["service_tier"])
    begin, resume = values["add_generation_prompt"], values["continue_final_message"]
    if begin and resume:
        message = "add_generation_prompt and continue_final_message exclude each other: only one can be true"
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    values["add_generation_prompt"] = not resume if begin is None else begin
    return ChatRequest(messages=values.pop("messages"), **_common(values))


def _check_ranked(request: CompletionRequest) -> None:
    if request.candidates < request.n:
        message = f"best_of must be at least n, which is {request.n}, not {request.best_of}"
    elif request.stream and request.candidates > request.n:
        message = (
            f"best_of is {request.best_of} and n {request.n}: the best are known at the end, so stream must be false"
        )
    else:
        return
    raise RequestError(message, param="best_of", code="invalid_value")


def _check_count(name: str, candidates: int, prompts: int) -> None:
    if candidates * prompts > MAX_CHOICES:
        message = (
            f"{prompts} prompts with {name} {candidates} are {candidates * prompts} choices, more than {MAX_CHOICES}"
        )
        raise RequestError(message, param=name, code="invalid_value")


def _common(values: dict[str, Any]) -> dict[str, Any]:
    values["top_k"] = max(values["top_k"], 0)  # -1 is another way to say off
    if values["stream"] and values["prompt_logprobs"] is not None:
        message = "prompt_logprobs come with the whole answer, not with a stream: send stream false"
        raise RequestError(message, param="prompt_logprobs", code="invalid_value")
    return values


def _class(priority: Priority | None, service_tier: str | None) -> Priority:
    """The class that a chat asks for, in our words or OpenAI's."""
    tier = None if service_tier is None else SERVICE_TIERS[service_tier]
    if priority is not None and tier is not None and priority is not tier:
        message = f"priority {priority} and the service_tier, which is {tier} here, disagree: send one of them"
        raise RequestError(message, param="service_tier", code="invalid_value")
    return priority or tier or Priority.NORMAL


def _values(body: object, route: Route) -> dict[str, Any]:
    """The value of every implemented parameter, defaults filled in."""
    if not isinstance(body, dict):
        message = f"the request body must be a JSON object, not {'null' if body is None else show(body)}"
        raise RequestError(message, code="invalid_type")
    rows = parameters_of(route)
    for name in body:
        if name not in rows:
            message = f"{show(name)} is not a parameter of this request"
            raise RequestError(message, param=str(name)[:64], code="unknown_parameter")
    return {name: value for name, row in rows.items() for value in _read(row, body)}


def _read(row: Parameter, body: dict[str, Any]) -> list[Any]:
    """The row's value for this body, in a list; empty for a refused parameter left neutral."""
    value = body.get(row.name)
    if row.check is None:
        if not row.is_neutral(value):
            message = f"{row.name} {row.refusal} (it was {show(value)})"
            raise RequestError(message, param=row.name, code="unsupported_parameter")
        return []
    if row.required and row.name not in body:
        message = f"{row.name} is missing"
        raise RequestError(message, param=row.name, code="missing_required_parameter")
    if value is None and not row.required:
        return [row.default]
    return [row.check(row.name, value)]
