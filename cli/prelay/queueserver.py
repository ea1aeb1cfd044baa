"""Ask the server at a URL whether it will do."""

from __future__ import annotations

import logging

from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.identity import process_prefix
from prelay_queue.server import ServerInfo, inspect, load_scripts
from prelay_queue.settings import QueueSettings

from .errors import ServerError
from .redact import redact

log = logging.getLogger("prelay.serve")


def inspect_server(url: str, option: str = "--redis-url") -> ServerInfo:
    """Return what it is, after all our scripts were loaded into it. `option` is where the URL came from.

    Raise ServerError with one line when it does not answer, is unfit or cannot run the scripts.
    """
    try:
        queue = SyncQueue(QueueSettings(url=url, fleet="inspect"))
    except ValueError as error:
        raise ServerError(f"{option} {redact(url)}: {error}") from None
    try:
        info = inspect(queue.redis)
        if problems := info.problems():
            raise ServerError(f"{redact(url)}: {'; '.join(problems)}")
        load_scripts(queue)
    except QueueError as error:
        raise ServerError(f"{redact(url)}: {error}") from None
    finally:
        queue.close()
    return info


def disown(settings: QueueSettings, pid: int) -> None:
    """End the leases of a worker of this host whose process is known to have ended. Says what fails; never raises."""
    queue = SyncQueue(settings)
    try:
        queue.run(queue.scripts.disown(process_prefix(pid)))
    except QueueError as error:
        log.warning("the leases of process %d end by time: %s", pid, error)
    finally:
        queue.close()
