"""Errors of the batch worker.

BatchError
├── StartupError   the worker cannot start as it is configured; one line, for the operator
└── LeaseLost      another runs this batch, or nobody may any more: stop at once, write nothing more
"""

from __future__ import annotations


class BatchError(Exception):
    """The batch worker could not do what was asked."""


class StartupError(BatchError):
    """The worker cannot start as it is configured. One line, for the operator."""


class LeaseLost(BatchError):  # noqa: N818 - reads as the fact it states
    """The batch is not ours any more. `code` is fenced, over or gone."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the lease on the batch is lost: {code}")
        self.code = code
