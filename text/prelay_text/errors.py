"""Errors of the text package.

TextError
├── ModelFilesError   a model folder lacks a file, or a file in it cannot be used
├── RequestError      the client's request cannot be served as it stands; carries the HTTP answer
└── RewindError       the assembler was asked to forget what it has handed out
"""

from __future__ import annotations


class TextError(Exception):
    """The text side could not do what was asked."""


class ModelFilesError(TextError):
    """A model folder lacks a file, or a file in it cannot be used. One line, for the operator."""


class RequestError(TextError):
    """The client's request cannot be served as it stands.

    `status` is the HTTP status, the other fields are those of OpenAI's error body. `message` names
    the parameter, the limit and the value that broke it.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type: str = "invalid_request_error",  # noqa: A002 - the field's name in OpenAI's error body
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type


class RewindError(TextError):
    """The assembler was asked to forget what it has handed out, or what it never had."""
