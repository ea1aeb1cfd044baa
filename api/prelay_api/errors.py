"""Errors of the API process.

ApiError
├── StartupError      the process cannot start; one line that says what to do
├── BodyTooLarge      a request body beyond the limit
└── Closing           the process stops, and ends what is under way
"""

from __future__ import annotations


class ApiError(Exception):
    """The API process could not do what was asked."""


class StartupError(ApiError):
    """The process cannot start."""


class BodyTooLarge(ApiError):  # noqa: N818 - reads as the fact it states
    """A request body is beyond the limit."""


class Closing(ApiError):  # noqa: N818
    """The process stops, and ends what is under way."""
