"""The files and batches of a running server, asked for over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import httpx

from ..apikeys import client_headers
from ..errors import CliError, Refused
from .batch import Batch
from .patience import Patience

#: Statuses that say: not now.
_LATER = (408, 429, 502, 503, 504)
#: For a question; and for a file, which the server syncs before it answers; seconds.
_TIMEOUT, _FILE_TIMEOUT = httpx.Timeout(30.0, connect=5.0), httpx.Timeout(60.0, connect=5.0, read=600.0)
#: Batches on a page of the list, and pages that are looked through for a batch of ours.
_PAGE, _PAGES = 100, 10
#: The name in a batch's metadata by which a run finds what it created.
RUN = "prelay_run"


class BatchServer:
    """A server. Every method waits for one that goes away meanwhile, and raises Refused with its own words."""

    def __init__(self, url: str, api_key: str | None, patience: Patience) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._http = httpx.Client(base_url=self.url, headers=client_headers(api_key), timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the model that is served."""
        try:
            return str(self._json("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise CliError(f"{self.url} answers, and is no OpenAI-style API") from None

    def upload(self, file: BinaryIO, name: str, told: Callable[[int], None]) -> str:
        """Store a file of lines and return its id. `told` hears how many bytes were sent.

        An answer that is lost leaves a file that nobody uses on the server: it is sent again.
        """

        def send() -> httpx.Response:
            parts = {"file": (name, _Counted(file, told), "application/jsonl")}
            form = {"purpose": "batch"}
            return self._http.post("/v1/files", data=form, files=parts, timeout=_FILE_TIMEOUT)  # type: ignore[arg-type]

        return str(_read(self._until_answered(send))["id"])

    def create(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> Batch:
        """Begin a batch. Where an answer is lost, it is looked for by RUN in its metadata, then asked for again."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window, "metadata": metadata}
        while True:
            try:
                answer = self._http.post("/v1/batches", json=body)
                if self._check(answer):
                    return Batch.decode(_read(answer))
            except httpx.TransportError as error:
                self._lost(error)
            if (found := self.find(metadata[RUN])) is not None:
                return found

    def batch(self, batch_id: str) -> Batch:
        return Batch.decode(self._json("GET", f"/v1/batches/{_in_path(batch_id)}"))

    def cancel(self, batch_id: str) -> Batch:
        return Batch.decode(self._json("POST", f"/v1/batches/{_in_path(batch_id)}/cancel"))

    def newest(self, limit: int) -> list[Batch]:
        """Return the newest batches, the newest first."""
        found: list[Batch] = []
        for page in self._pages(min(limit, _PAGE)):
            found += page
            if len(found) >= limit:
                break
        return found[:limit]

    def find(self, run: str) -> Batch | None:
        """Return the batch that a run created."""
        for number, page in enumerate(self._pages(_PAGE, between=True), 1):
            for batch in page:
                if (batch.metadata or {}).get(RUN) == run:
                    return batch
            if number == _PAGES:
                break
        return None

    def size(self, file_id: str) -> int:
        """Return the bytes of a file."""
        return int(self._json("GET", f"/v1/files/{_in_path(file_id)}").get("bytes") or 0)

    def content(self, file_id: str, into: BinaryIO, told: Callable[[int], None]) -> int:
        """Write a file's content, and return its bytes. A broken transfer goes on where it broke, if the server can."""
        start = into.tell()
        while True:
            got = into.tell() - start
            try:
                with self._content(file_id, got) as answer:
                    if answer.status_code == 200 and got:  # the whole of it again
                        into.seek(start)
                        into.truncate()
                    elif answer.status_code not in (200, 206):
                        answer.read()
                        self._check(answer)
                        continue
                    self._patience.heard()
                    for chunk in answer.iter_raw():
                        into.write(chunk)
                        told(into.tell() - start)
                return into.tell() - start
            except httpx.TransportError as error:
                self._lost(error)

    @contextmanager
    def _content(self, file_id: str, begin: int) -> Iterator[httpx.Response]:
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={begin}-"} if begin else {})
        with self._http.stream("GET", f"/v1/files/{_in_path(file_id)}/content", headers=headers) as answer:
            yield answer

    def _pages(self, limit: int, between: bool = False) -> Iterator[list[Batch]]:
        after: dict[str, str] = {}
        while True:
            ask = partial(self._http.get, "/v1/batches", params={"limit": str(limit)} | after)
            body = _read(self._until_answered(ask, between))
            page = [Batch.decode(each) for each in body.get("data") or ()]
            yield page
            if not page or not body.get("has_more"):
                return
            after = {"after": page[-1].id}

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Ask something that may be asked twice."""
        return _read(self._until_answered(lambda: self._http.request(method, path, **more)))

    def _until_answered(self, send: Callable[[], httpx.Response], between: bool = False) -> httpx.Response:
        while True:
            try:
                answer = send()
            except httpx.TransportError as error:
                self._lost(error)
                continue
            if self._check(answer, between):
                return answer

    def _check(self, answer: httpx.Response, between: bool = False) -> bool:
        """True for an answer; wait where it says not now. `between` two tries of something else it ends no waiting.

        Raise Refused.
        """
        if answer.status_code in _LATER:
            self._patience.has_answered = True
            self._patience.lost(_error_of(answer), _retry_after(answer))
            return False
        if not between:
            self._patience.heard()
        _refuse(answer)
        return True

    def _lost(self, error: httpx.TransportError) -> None:
        """Wait. A server that never answered is most likely not there: raise CliError."""
        if not self._patience.has_answered and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise CliError(
                f"no server answers at {self.url} ({error}): start one (prelay serve), name another (--url),"
                " or let the run start its own (prelay batch run --serve)"
            ) from None
        if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
            raise CliError(f"--url {self.url}: {error}") from None
        self._patience.lost(str(error) or type(error).__name__)


class _Counted:
    """A file that tells how much of it was read. httpx reads it, asks for its length, and rewinds it to send again."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file, self._told = file, told
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self._told(self._file.tell())
        return chunk

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()


def _in_path(name: str) -> str:
    """An id from the command line becomes a part of a path, and nothing else."""
    if not name or not all(char.isalnum() or char in "-_" for char in name) or not name.isascii():
        raise CliError(f"{name!r} is no id: ids have letters, digits, - and _")
    return name


def _read(answer: httpx.Response) -> dict[str, Any]:
    _refuse(answer)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CliError(f"{answer.url} answers with no JSON object")
    return body


def _refuse(answer: httpx.Response) -> None:
    if answer.status_code >= 400:
        raise Refused(_error_of(answer), answer.status_code)
    if answer.status_code >= 300:
        raise CliError(f"{answer.url} answers with status {answer.status_code}, and is no OpenAI-style API")


def _error_of(answer: httpx.Response) -> str:
    try:
        return f"{answer.json()['error']['message']} (status {answer.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answers with status {answer.status_code}"


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
