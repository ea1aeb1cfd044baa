"""prelay.client: what it asks for, without a server."""

from __future__ import annotations

import httpx
import pytest

from prelay.client import StreamError, _Course


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
@pytest.mark.parametrize("path", ["/v1/completions", "v1/completions"])
def test_a_path_is_found_however_it_and_the_url_are_written(url: str, path: str) -> None:
    course = _Course(path, {}, (url,), None, 1.0)
    assert course.request()["url"] == "http://a:1/v1/completions"


def test_a_server_that_shuts_down_has_not_ended_the_stream() -> None:
    """It says [DONE] behind its error, as for every client; the stream goes on elsewhere."""
    course = _Course("/v1/completions", {}, ("http://a:1",), None, 1.0)
    course.request()
    course.request_id = "cmpl-1"
    for line in ('id: 1-3', 'data: {"choices": []}', "", 'data: {"error": {"code": "service_unavailable"}}', "",
                 "data: [DONE]", ""):  # fmt: skip
        course.hear(line)
    assert not course.done
    assert course.request()["headers"]["last-event-id"] == "1-3"
    course.hear("data: [DONE]")
    course.hear("")
    assert course.done


@pytest.mark.parametrize(("status", "after"), [(400, "0"), (429, "11"), (503, "600")])
def test_a_time_beyond_its_patience_is_not_slept_through(status: int, after: str) -> None:
    course = _Course("/v1/completions", {}, ("http://a:1",), None, 10.0)
    course.request()
    assert not course.begins(status, httpx.Headers({"retry-after": after}))
    with pytest.raises(StreamError, match=f"{status}: later"):
        course.refused(status, b'{"error": {"message": "later"}}')


def test_a_time_within_its_patience_is_waited() -> None:
    course = _Course("/v1/completions", {}, ("http://a:1",), None, 10.0)
    course.request()
    course.begins(429, httpx.Headers({"retry-after": "3"}))
    course.refused(429, b"busy")
    assert course.pause_s() == 3
