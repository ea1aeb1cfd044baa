"""Schemathesis reads the OpenAPI page and asks for all that stands on it, with right values and with wrong ones.

What is right by the page is served or refused as an error of the client, what is wrong by it is refused, and every
answer is one that the page describes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.bed.processes import Api
from tests.integration.fuzzed import target

__all__ = ["target"]

#: Their bodies are small, and their answers wait for the disk.
BATCHES = [("POST", "/v1/files"), ("POST", "/v1/batches")]
WITH_BODY = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    *BATCHES,
]
#: Besides those with an id in their path: nobody guesses one.
NEEDS_AN_ID = {("POST", "/v1/batches")}
OPERATIONS = [
    *WITH_BODY,
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/streams/{request_id}"),
    ("DELETE", "/v1/streams/{request_id}"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/admin/overview"),
    ("GET", "/admin/workers"),
    ("POST", "/admin/workers/{worker}/drain"),
    ("GET", "/admin/jobs"),
    ("GET", "/admin/jobs/{request_id}"),
    ("POST", "/admin/jobs/{request_id}/preempt"),
    ("POST", "/admin/jobs/{request_id}/cancel"),
    ("GET", "/admin/dead"),
    ("POST", "/admin/dead/{letter_id}/retry"),
    ("DELETE", "/admin/dead/{letter_id}"),
]

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def page(target: Api) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_dict(httpx.get(f"{target.url}/openapi.json").json())


def test_every_operation_on_the_page_is_tried(page: schemathesis.BaseSchema) -> None:
    found = {(method.upper(), path) for path in page for method in page[path]}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if not each[1].startswith(("/admin", "/health"))])
def test_an_answer_in_json_has_a_schema(page: schemathesis.BaseSchema, operation: tuple[str, str]) -> None:
    method, path = operation
    found = page.raw_schema["paths"][path][method.lower()]["responses"]
    answers = [answer.get("content", {}) for status, answer in found.items() if status.startswith("2")]
    assert any(answers)
    assert all(content["application/json"].get("schema") for content in answers if "application/json" in content)


def walk(
    page: schemathesis.BaseSchema,
    target: Api,
    operation: tuple[str, str],
    mode: schemathesis.GenerationMode,
    count: int,
) -> Counter[int]:
    """Ask `count` times and hold each answer to the checks; return how often each status came."""
    method, path = operation
    found: Counter[int] = Counter()

    @given(case=page[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case: schemathesis.Case[Any]) -> None:
        response = case.call(base_url=target.url, timeout=20)
        found[response.status_code] += 1
        # A deadline of a millisecond is kept: that is no failure of the server.
        assert response.status_code < 500 or b'"deadline_exceeded"' in response.content, response.content
        case.validate_response(response, checks=CHECKS)

    run()
    return found


RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_what_is_right_by_the_page_is_answered_as_it_says(
    page: schemathesis.BaseSchema, target: Api, operation: tuple[str, str]
) -> None:
    found = walk(page, target, operation, RIGHT, 40 if operation in WITH_BODY else 5)
    assert found[200] or "{" in operation[1] or operation in NEEDS_AN_ID, found


@pytest.mark.parametrize("operation", WITH_BODY, ids=" ".join)
def test_what_is_wrong_by_the_page_is_refused(
    page: schemathesis.BaseSchema, target: Api, operation: tuple[str, str]
) -> None:
    found = walk(page, target, operation, WRONG, 40)
    assert all(400 <= status < 500 for status in found), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", WITH_BODY, ids=" ".join)
@pytest.mark.parametrize("mode", [RIGHT, WRONG])
def test_the_page_is_true_at_length(
    page: schemathesis.BaseSchema,
    target: Api,
    operation: tuple[str, str],
    mode: schemathesis.GenerationMode,
) -> None:
    walk(page, target, operation, mode, 100 if operation in BATCHES else 500)
