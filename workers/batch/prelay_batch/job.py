"""What RQ runs in a work horse: one batch."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import dataclass

from rq import Retry

from prelay_files.errors import FileMissing, FilesError
from prelay_text.tokenizer import Tokenizer

from .config import BatchConfig
from .runner import Outcome, Runner

log = logging.getLogger("prelay.batch")

#: After the disk refused something the batch is tried again this much later, seconds.
DISK_PAUSE_S = 5.0
#: A batch is given back to RQ as often as it takes.
_ANY = 2**31


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process has loaded before it runs batches."""

    config: BatchConfig
    tokenizer: Tokenizer
    system_fingerprint: str


#: RQ finds `run_batch` by its name and gives it the batch's id alone, so the rest lies here, set before the fork.
_ready: Ready | None = None
_stopping = threading.Event()


def prepare(ready: Ready) -> None:
    """To be called once in the process whose forks run batches."""
    global _ready
    _ready = ready


def stop_on_sigterm() -> None:
    """A SIGTERM makes the batch that runs here go on elsewhere."""
    signal.signal(signal.SIGTERM, lambda *_: _stopping.set())


def run_batch(batch_id: str) -> Retry | None:
    """Run a batch; the answer says to RQ whether it is to be run again, by any worker."""
    assert _ready is not None, "prepare() comes first"
    try:
        runner = Runner(_ready.config, _ready.tokenizer, _ready.system_fingerprint, batch_id, _stopping.is_set)
        outcome = runner.run()
    except FileMissing as error:
        log.error("%s", error)
        return None
    except FilesError as error:
        log.error("%s: %s; it is tried again", batch_id, error)
        _stopping.wait(DISK_PAUSE_S)
        return Retry(max=_ANY)
    log.info("%s: %s", batch_id, outcome)
    return Retry(max=_ANY) if outcome is Outcome.STOPPED else None
