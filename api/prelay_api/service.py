"""Everything that one API process has, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial
from typing import cast

from starlette.requests import Request

from prelay_queue.client import AsyncQueue
from prelay_queue.identity import incarnation
from prelay_queue.metric_table import Part
from prelay_queue.metrics import Metrics
from prelay_text.errors import RequestError
from prelay_text.fingerprint import fingerprint
from prelay_text.render import Renderer
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.resolve import check_model, resolve
from prelay_text.tokenizer import Tokenizer
from prelay_text.whole import renderer_of

from .admission import MemoryWatch
from .batches import Batches
from .canceller import Canceller
from .config import ApiConfig
from .deadline import Deadlines
from .fleet import FleetWatch
from .hub import Hub
from .idempotency import Sent
from .metrics import outcome
from .outcome import CLOSING, Failure
from .request_id import new_id
from .resume import Cursor, resume
from .session import Links, Session
from .sweeper import Sweeper
from .transfers import Transfers
from .watchdog import Watchdog

log = logging.getLogger("prelay.api")


class Service:
    """The parts of one API process. `tokenizer` is loaded beforehand: a broken model folder is found at start."""

    def __init__(self, config: ApiConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.id = incarnation()
        self.tokenizer = tokenizer
        self.model_created = int((config.model / "config.json").stat().st_mtime)  # the same in every process
        self.fingerprint = f"fp_{fingerprint(config.model)}"
        self.closing = False
        self.told = False  # the open requests know that
        self.sessions: set[Session] = set()
        self.transfers = Transfers()
        self._batches: Batches | None = None
        self._watchdog: Watchdog | None = None
        self.metrics = Metrics(Part.API, Part.EVERY)

    async def start(self) -> None:
        """Connect and begin to listen; Redis need not answer yet."""
        self.queue = AsyncQueue(self.config.queue, self.metrics)
        self.hub = Hub(self.queue, self.id)
        self.canceller = Canceller(self.queue)
        self.sweeper = Sweeper(self.queue, self.hub.contact, self.metrics)
        self.fleet = FleetWatch(self.queue)
        self.deadlines = Deadlines(self.queue, self.metrics)
        self.memory = MemoryWatch(self.queue)
        keep_delivered = self.config.keep == "delivered"
        self._links = Links(self.hub, self.canceller, self.tokenizer, keep_delivered, self._closed, self.metrics)
        for part in (self.hub, self.canceller, self.sweeper, self.fleet, self.deadlines, self.memory):
            part.start()
        if self.config.files_dir is not None:
            self._batches = Batches(self.config.files_dir, self.queue, self.config.jobs_url)
            self._watchdog = Watchdog(self._batches)
            self._watchdog.start()

    @property
    def batches(self) -> Batches:
        """Raise RequestError, 404, where this server has no folder for files."""
        if self._batches is None:
            message = "files and batches are off here: prelay serve --batch N has them, or prelay api --files-dir DIR"
            raise RequestError(message, code="not_served", status=404)
        return self._batches

    def begin_closing(self) -> None:
        """Take no new requests; those that are open go on."""
        self.closing = True

    def tell(self) -> None:
        """Tell every open request to try again elsewhere, or later; hand on a stream whose client will come back.

        May be called more than once.
        """
        self.told = True
        self.transfers.end()
        for session in list(self.sessions):
            self.tell_one(session)

    def tell_one(self, session: Session) -> None:
        """Tell the client of one request, as soon as it is known whether it will come back."""
        if session.linger_s:
            session.hand_on()
        else:
            session.abort(CLOSING)

    async def stop(self) -> None:
        """Stop in the order in which nothing is lost.

        1 the sweeps and the looks, which nobody waits for; 2 the cancels of the requests that were open; 3 the ear,
        which takes our keys along; 4 the connections of all of them.
        """
        if self._watchdog is not None:
            await self._watchdog.stop()
        await self.sweeper.stop()
        await self.fleet.stop()
        await self.deadlines.stop()
        await self.memory.stop()
        await self.canceller.stop(timeout_s=3)
        await self.hub.stop(lingering=self.canceller.lingering)
        if self._batches is not None:
            await self._batches.close()
        await self.queue.aclose()

    async def open(self, request: CompletionRequest | ChatRequest, sent: Sent | None = None, *, long: bool) -> Session:
        """Begin a session; its deadline runs. Always `close` it. Raise RequestError when the request cannot be served
        as it stands, and QueueFull while Redis has no memory for it.

        A `long` one is tokenised in a thread, so that it does not hold up every stream of this process.
        """
        began = time.monotonic()
        self.memory.check()
        check_model(request, self.config.served_model_name)
        limits = await self.fleet.limits(self.tokenizer.context_len)
        work = partial(resolve, request, self.tokenizer, limits, spare_seed=secrets.randbits(64))
        parts = await asyncio.to_thread(work) if long else work()
        session = Session.begin(self._links, self._renderer(request), request, parts, sent, arrived_at=began)
        self._opened(session)
        if request.deadline_ms is not None:
            self.deadlines.set(session, began + request.deadline_ms / 1000)
        return session

    def _opened(self, session: Session) -> None:
        self.sessions.add(session)
        self.metrics.set("prelay_open_requests", len(self.sessions))

    def _closed(self, session: Session) -> None:
        self.sessions.discard(session)
        self.deadlines.forget(session)
        self.metrics.set("prelay_open_requests", len(self.sessions))
        if session.attached:  # what was refused is counted where it is told so
            ended = outcome([choice.relay.end for choice in session.choices], lingers=session.linger_s > 0)
            self.metrics.inc("prelay_requests_total", session.cls, ended)
            if session.arrived_at is not None and ended in ("stop", "length"):
                took = time.monotonic() - session.arrived_at
                self.metrics.observe("prelay_e2e_request_latency_seconds", took, session.cls)

    async def resume(self, request_id: str, cursor: Cursor | None) -> Session | Failure:
        """A session that goes on with a stream, wherever that began. Always `close` it. Raise as `resume` does."""
        session = await resume(self._links, request_id, cursor)
        if isinstance(session, Session):
            self._opened(session)
            if session.ends_at:
                self.deadlines.set(session, session.ends_at)
        return session

    def _renderer(self, request: CompletionRequest | ChatRequest) -> Renderer:
        kind = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        return renderer_of(
            request,
            id=new_id(kind),
            created=int(time.time()),
            model=self.config.served_model_name,
            system_fingerprint=self.fingerprint,
        )


def service_of(request: Request) -> Service:
    """The service of the app that got this request."""
    return cast(Service, request.app.state.service)
