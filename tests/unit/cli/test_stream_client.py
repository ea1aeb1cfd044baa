"""prelay.client: what it asks for, without a server."""

from __future__ import annotations

import pytest

from prelay.client import _Course


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
@pytest.mark.parametrize("path", ["/v1/completions", "v1/completions"])
def test_a_path_is_found_however_it_and_the_url_are_written(url: str, path: str) -> None:
    course = _Course(path, {}, (url,), None, 1.0)
    assert course.request()["url"] == "http://a:1/v1/completions"
