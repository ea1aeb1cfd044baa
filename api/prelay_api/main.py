"""Entry of an API process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prelay_files.errors import FilesError
from prelay_files.store import check_root
from prelay_files.users import FolderUser, check_queue
from prelay_queue.apis import announce, known
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.server import inspect
from prelay_text.errors import TextError
from prelay_text.tokenizer import Tokenizer

from .app import create_app
from .config import ApiConfig
from .errors import StartupError
from .server import Server, bind, url_of
from .service import Service

log = logging.getLogger("prelay.api")


def run(config: ApiConfig) -> int:
    """Serve until told to stop; return the exit code. What cannot work is one line on stderr and 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        _check(config)
        service = Service(config, Tokenizer.load(config.model))
        user = _use_folder(config, service.id)
        listener = bind(config.host, config.port, share=config.share_port)
    except (StartupError, TextError, FilesError) as error:
        print(f"prelay api: {error}", file=sys.stderr)
        return 1
    server = Server(create_app(service), service, config.shutdown_grace_s)
    log.info("serving %s on %s", config.served_model_name, url_of(listener))
    server.run(sockets=[listener])
    if user is not None:
        user.close()
    return 0 if server.started else 1


def _use_folder(config: ApiConfig, name: str) -> FolderUser | None:
    """Use the folder of files, if there is one: our queue hears of us first, then the folder, then we look who else
    does. Raise FilesError. Where Redis does not answer, nobody can be told from a stranger."""
    if config.files_dir is None:
        return None
    check_root(config.files_dir)
    queue = SyncQueue(config.queue)
    user: FolderUser | None = None
    try:
        with _unless_away():
            announce(queue, name)
        user = FolderUser(config.files_dir, name)
        with _unless_away():
            check_queue(config.files_dir, partial(known, queue))
    except FilesError:
        if user is not None:
            user.close()
        raise
    finally:
        queue.close()
    return user


@contextmanager
def _unless_away() -> Iterator[None]:
    try:
        yield
    except QueueError as error:
        log.warning("whether others with another queue use the folder of files is not known: %s", error)


def _check(config: ApiConfig) -> None:
    """Refuse what can never work. A server that does not answer yet may come: it is waited for while serving."""
    if config.keep not in ("delivered", "emitted"):
        raise StartupError(f"keep must be delivered or emitted, not {config.keep!r}")
    try:
        queue = SyncQueue(config.queue)
    except ValueError as error:
        raise StartupError(f"redis url: {error}") from None
    try:
        found = inspect(queue.redis)
    except QueueError as error:
        log.warning("%s; serving 503 until it does", error)
        return
    finally:
        queue.close()
    if problems := found.problems():
        raise StartupError("; ".join(problems))
    for warning in found.warnings():
        log.warning("%s", warning)
