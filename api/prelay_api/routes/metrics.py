"""GET /metrics, for Prometheus."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from prelay_queue.errors import QueueError

from ..scrape import Figures, read_figures, render
from ..service import Service, service_of

log = logging.getLogger("prelay.metrics")

router = APIRouter(tags=["Metrics"])

#: Where Redis has not answered by then, the rest is shown without it, seconds.
ANSWER_WITHIN_S = 2.0


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus's text format. Under `prelay serve` the figures are of all its processes; docs/metrics.md lists them.

    With API keys configured it wants one, as everything but the health routes does.
    """
    service = service_of(request)
    figures, own = await asyncio.gather(_figures(service), asyncio.to_thread(_own, service))
    body = own + render(figures, service.config.queue.fleet)
    return Response(body, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _figures(service: Service) -> Figures | None:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await read_figures(service.queue)
    except (TimeoutError, QueueError):
        return None


def _own(service: Service) -> bytes:
    try:
        return service.metrics.text()
    except Exception:  # a file of another process that cannot be read; what Redis says is shown still
        log.exception("the metrics of this fleet cannot be read")
        return b""
