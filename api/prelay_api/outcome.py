"""How an answer that did not end well is told: an HTTP status, or the last event of a stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from prelay_queue.job import FinishReason
from prelay_text.errors import RequestError
from prelay_text.render import error_body

from .relay import End

#: Seconds after which a client may try again when the service is going away or its queue does not answer.
RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status and OpenAI's error object. `retry_after_s` is told when trying again makes sense."""

    status: int
    message: str
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> bytes:
        return error_body(self.message, type=self.type, param=self.param, code=self.code)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def encode(self) -> str:
        """The form in which a job's error travels."""
        fields = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return orjson.dumps({**fields, "status": self.status}).decode()


UNAVAILABLE = Failure(
    503, "the queue (Redis) does not answer; try again", code="service_unavailable", retry_after_s=RETRY_AFTER_S
)
FULL = Failure(503, "the queue is full (Redis is over its memory limit); try again", code="queue_full", retry_after_s=5)
CLOSING = Failure(
    503, "this server is shutting down; try again", code="service_unavailable", retry_after_s=RETRY_AFTER_S
)
INTERNAL = Failure(500, "the server failed on this request", code="internal_error")
CANCELLED = Failure(410, "the request was cancelled before it was complete", code="cancelled")
DEADLINE = Failure(504, "the request was not complete by its deadline", code="deadline_exceeded", param="deadline_ms")


def internal_error() -> str:
    """INTERNAL in the form in which a job's error travels."""
    return INTERNAL.encode()


def late(deadline_ms: int | None) -> Failure:
    """The deadline has passed that a request was given; None: whatever it was."""
    if deadline_ms is None:
        return DEADLINE
    return replace(DEADLINE, message=f"the request was not complete within its deadline_ms, which is {deadline_ms}")


def refused(error: RequestError) -> Failure:
    """A request that was not accepted."""
    return Failure(error.status, error.message, error.type, error.code, error.param)


def failure(end: End) -> Failure | None:
    """What went wrong, or None for an answer that is complete."""
    match end.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.CANCELLED:
            return CANCELLED
        case FinishReason.DEADLINE:
            return DEADLINE
        case FinishReason.ERROR:
            return _from_job(end.error)


def _from_job(error: str) -> Failure:
    """Read a job's error body: OpenAI's fields and an HTTP status. Whatever it is, the client gets an error."""
    try:
        body: Any = orjson.loads(error)
        status = body.get("status")
        valid = isinstance(status, int) and 400 <= status <= 599
        return Failure(
            status=status if valid else 500,
            message=str(body["message"]),
            type=str(body.get("type") or "server_error"),
            code=body.get("code"),
            param=body.get("param"),
            retry_after_s=RETRY_AFTER_S if status == 503 else None,
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return INTERNAL
