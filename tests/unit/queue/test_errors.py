"""A driver's exception becomes one of ours that says whether to try again."""

from __future__ import annotations

import pytest
from redis import exceptions as driver

from prelay_queue.client import is_missing_group, translate
from prelay_queue.errors import QueueError, QueueFull, QueueUnavailable


@pytest.mark.parametrize(
    "error",
    [
        driver.ConnectionError("Connection refused"),
        driver.TimeoutError("Timeout reading from socket"),
        driver.BusyLoadingError("Redis is loading the dataset in memory"),
        driver.ReadOnlyError("You can't write against a read only replica."),
        driver.MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        driver.ClusterDownError("The cluster is down"),
        driver.TryAgainError("Multiple keys request during rehashing of slot"),
        driver.ResponseError("NOREPLICAS Not enough good replicas to write."),
        driver.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        driver.ResponseError("UNBLOCKED force unblock from blocking operation"),
        driver.ResponseError("BUSY Redis is busy running a script."),
    ],
    ids=str,
)
def test_what_passes_by_itself_is_unavailable(error: Exception) -> None:
    assert isinstance(translate(error), QueueUnavailable)


@pytest.mark.parametrize(
    "error",
    [
        driver.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        driver.ResponseError("OOM command not allowed when used memory > 'maxmemory'."),
    ],
    ids=str,
)
def test_a_full_server_is_full_and_not_unavailable(error: Exception) -> None:
    assert isinstance(translate(error), QueueFull)


def test_anything_else_is_a_plain_queue_error_with_the_servers_words() -> None:
    found = translate(driver.ResponseError("WRONGTYPE Operation against a key"))
    assert type(found) is QueueError
    assert "WRONGTYPE" in str(found)


def test_an_error_without_words_is_named_by_its_class() -> None:
    assert "TimeoutError" in str(translate(driver.TimeoutError()))


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("NOGROUP No such key 'x' or consumer group 'g'", True),
        ("UNBLOCKED the stream key no longer exists", True),
        ("WRONGTYPE Operation against a key", False),
    ],
)
def test_a_vanished_stream_is_known_by_both_servers_words(words: str, missing: bool) -> None:
    assert is_missing_group(driver.ResponseError(words)) is missing
