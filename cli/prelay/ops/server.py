"""The admin routes of a server, with its refusals as one line that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from ..apikeys import client_headers
from ..errors import CliError

#: An answer takes no longer than this, seconds: it is read from Redis, at most 20,000 jobs.
PATIENCE_S = 20.0


class Refused(CliError):  # noqa: N818 - reads as the fact it states
    """The server said no; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AdminServer:
    """A server to be asked. Use it as a context manager. Every method raises CliError when there is no answer."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """OpenAI's clients want a base URL that ends in /v1, so people have that one at hand: it does too."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = client_headers(api_key)
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False)
        except httpx.InvalidURL as error:
            raise CliError(f"--url {url!r} is no URL: {error}") from None

    def __enter__(self) -> AdminServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def overview(self) -> dict[str, Any]:
        return self._ask("GET", "/admin/overview")

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", "/admin/workers")["workers"]
        return found

    def drain(self, worker: str) -> dict[str, Any]:
        return self._ask("POST", f"/admin/workers/{_part(worker)}/drain")

    def jobs(self, wanted: Mapping[str, str | int]) -> dict[str, Any]:
        """`wanted` as the route takes it: state, priority, worker, limit."""
        return self._ask("GET", "/admin/jobs", params=dict(wanted))

    def job(self, request_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/admin/jobs/{_part(request_of(request_id))}")

    def preempt(self, request_id: str) -> dict[str, Any]:
        return self._ask("POST", f"/admin/jobs/{_part(request_of(request_id))}/preempt")

    def cancel(self, request_id: str) -> dict[str, Any]:
        return self._ask("POST", f"/admin/jobs/{_part(request_of(request_id))}/cancel")

    def dead(self, limit: int) -> dict[str, Any]:
        return self._ask("GET", "/admin/dead", params={"limit": limit})

    def retry(self, letter: str) -> dict[str, Any]:
        return self._ask("POST", f"/admin/dead/{_part(letter)}/retry")

    def drop(self, letter: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/admin/dead/{_part(letter)}")

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise CliError(f"no server answers at {self.url} ({error}); name it with --url") from None
        except httpx.HTTPError as error:
            raise CliError(f"{self.url}: {error or type(error).__name__}") from None
        if answer.status_code >= 400:
            raise Refused(_words(answer), answer.status_code)
        try:
            found: dict[str, Any] = answer.json()
            return found
        except ValueError:
            raise CliError(f"{self.url} answers, and is no Prelay server") from None


def request_of(name: str) -> str:
    """The request of a job: people copy `<request>/<choice>` from a list."""
    request, mark, choice = name.rpartition("/")
    return request if mark and choice.isdigit() else name


def _part(text: str) -> str:
    return quote(text, safe="")


def _words(answer: httpx.Response) -> str:
    try:
        words = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answers with status {answer.status_code}: is it a Prelay server?"
    hint = "; set PRELAY_API_KEY" if answer.status_code == 401 else ""
    return f"{words}{hint} (status {answer.status_code})"
