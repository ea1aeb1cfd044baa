"""Batches as this process has them: on disk what was asked and how it ended, in Redis how far it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from prelay_files import keys
from prelay_files.errors import FileMissing, FilesError
from prelay_files.folder import BatchFolder
from prelay_files.ids import is_batch_id, new_batch_id
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore
from prelay_queue.batch_end import end_of, state_of
from prelay_queue.batch_jobs import BatchJobs
from prelay_queue.batches import BatchScripts, BatchState, BatchStatus
from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueError, QueueUnavailable, SentBefore
from prelay_queue.identity import incarnation
from prelay_text.errors import RequestError

from .batch_order import BatchOrder
from .idempotency import Resend
from .threads import in_thread

log = logging.getLogger("prelay.batches")

#: What stands on disk and not in Redis for less than this may just be opened by the process that wrote it, seconds.
OPENING_S = 30.0
#: So long is waited for one who makes a batch under the same key, seconds.
KEY_WAIT_S = 15.0
_END_LEASE_MS = 5_000


class Batches:
    """`root` is the folder of files. All methods may raise QueueUnavailable and FilesError, besides what they say."""

    def __init__(self, root: Path, queue: AsyncQueue, jobs_url: str) -> None:
        self.root = root
        self.files = FileStore(root)
        self._queue = queue
        self._fleet = queue.settings.fleet
        self._scripts = BatchScripts(queue.keys)
        self._jobs = BatchJobs(jobs_url or queue.settings.url, self._fleet)

    async def create_once(self, order: BatchOrder, resend: Resend) -> tuple[BatchRecord, BatchState | None]:
        """The batch that was made of this request before, or a new one. As `create`; raise SentBefore, too.

        The key is noted before the batch is there: who dies in between leaves a note of no batch, which counts for
        nothing.
        """
        note = await self._note_of(resend.sent.key)
        try:
            if time.time() - note.noted_at < resend.within_s:
                with suppress(FileMissing):
                    found = await self.find(note.batch_id)
                    if note.digest != resend.sent.digest:
                        raise SentBefore(note.batch_id, same=False)
                    return found
            batch_id = new_batch_id()
            await in_thread(lambda: note.write(batch_id, resend.sent.digest))
            return await self.create(order, batch_id)
        finally:
            note.close()

    async def create(self, order: BatchOrder, batch_id: str = "") -> tuple[BatchRecord, BatchState | None]:
        """1 the record on disk, 2 the state in Redis, 3 a job for a batch worker. Raise RequestError, QueueFull.

        When Redis refuses at 2, or does not say whether it took it, the record goes again: what the client was told has
        failed must not run, for it will send it again. Without its record nobody runs a batch, whatever Redis has.
        From 2 on it is accepted: what is missing then is done by the watchdog.
        """
        file = await in_thread(lambda: self._input(order.input_file_id))
        now = int(time.time())
        record = BatchRecord(
            id=batch_id or new_batch_id(),
            endpoint=order.endpoint,
            input_file_id=file,
            completion_window_s=order.window_s,
            created_at=now,
            expires_at=now + order.window_s,
            metadata=order.metadata,
            fleet=self._fleet,
        )
        folder = await in_thread(lambda: BatchFolder.create(self.root, record))
        try:
            await self._queue.run(self._scripts.open(record.id, record.encode(), order.window_s * 1000))
        except BaseException:
            await in_thread(folder.remove)
            raise
        await self._ensure(record.id)
        return record, await self._look(record.id)

    async def find(self, batch_id: str) -> tuple[BatchRecord, BatchState | None]:
        """A batch and its state, None while Redis does not know it. Raise FileMissing."""
        folder = BatchFolder(self.root, batch_id)
        return await self._with_state(await in_thread(folder.record))

    async def list(self, after: str, limit: int) -> Sequence[tuple[BatchRecord, BatchState | None]]:
        """The newest first, those that come behind the id `after`."""
        records = await in_thread(lambda: BatchFolder.list(self.root, after=after, limit=limit))
        return await asyncio.gather(*map(self._with_state, records))

    async def cancel(self, batch_id: str) -> tuple[BatchRecord, BatchState | None]:
        """Ask for the end of a batch; one that is over stays as it is. Raise FileMissing, RequestError."""
        record, state = await self.find(batch_id)
        if state is not None and state.status.over:
            return record, state
        if not self.is_mine(record):
            message = f"batch {batch_id} was asked of a server with another model: only such a one can cancel it"
            raise RequestError(message, param="batch_id", code="other_fleet", status=409)
        folder = BatchFolder(self.root, batch_id)
        await in_thread(folder.ask_cancel)
        if await self._queue.run(self._scripts.cancel(batch_id)) == "gone":
            await self.open_again(folder)  # Redis has lost it
        return await self._with_state(record)

    async def delete_file(self, file_id: str) -> None:
        """Raise FileMissing, or RequestError while a batch that is not over reads it."""
        await in_thread(lambda: self._delete(file_id))

    async def open_again(self, folder: BatchFolder) -> None:
        """Tell Redis what only the disk knows: the batch itself, and that it is to be cancelled. The other way round:
        an end that only Redis has."""
        record, epochs, cancelled = await in_thread(lambda: (folder.record(), folder.epochs(), folder.cancel_asked()))
        if not self.is_mine(record):
            return
        state = await self._look(folder.id)
        if state is None:
            left_ms = int((record.expires_at - time.time()) * 1000)
            floor = max(epochs, default=0)
            await self._queue.run(self._scripts.open(folder.id, record.encode(), left_ms, floor))
            log.warning("batch %s stood on disk only: it is opened again, above epoch %d", folder.id, floor)
        elif state.status.over:
            await self._keep_end(folder, state)
            return
        if cancelled and not (state and state.cancel):
            await self._queue.run(self._scripts.cancel(folder.id))
        if state is None:
            await self._ensure(folder.id)

    async def open_lost(self) -> None:
        """Compare the disk with Redis, batch by batch (see `open_again`)."""
        for folder in await in_thread(self._unfinished):
            try:
                await self.open_again(folder)
            except FileMissing:  # removed meanwhile
                continue
            except FilesError as error:
                log.error("batch %s cannot be read: %s", folder.id, error)

    async def ensure_stale(self, after_ms: int) -> None:
        """See to it that what nobody runs will be run."""
        for batch_id in await self._queue.run(self._scripts.stale(after_ms, 100)):
            if await in_thread(partial(self._has_record, batch_id)):
                await self._ensure(batch_id)
            else:
                await self._end_unknown(batch_id)

    async def sweep(self) -> None:
        """Remove what processes left half made that died."""
        for name in await in_thread(lambda: [*self.files.sweep(), *BatchFolder.sweep(self.root)]):
            log.info("%s was left by a process that died, and is removed", name)
        await in_thread(lambda: keys.sweep(self.root))

    def is_mine(self, record: BatchRecord) -> bool:
        """Whether this fleet runs it."""
        return record.fleet in ("", self._fleet)

    async def close(self) -> None:
        await in_thread(self._jobs.close)

    async def _with_state(self, record: BatchRecord) -> tuple[BatchRecord, BatchState | None]:
        """The end on disk stands, whatever Redis says."""
        folder = BatchFolder(self.root, record.id)
        if (end := await in_thread(folder.end)) is not None:
            return record, state_of(end, record.encode())
        state = await self._look(record.id)
        return record, await self._keep_end(folder, state) if state and state.status.over else state

    async def _keep_end(self, folder: BatchFolder, state: BatchState) -> BatchState:
        """Write an end that only Redis has, which forgets it."""
        stands = await in_thread(lambda: folder.write_end(end_of(state)))
        return state_of(stands, state.record)

    async def _look(self, batch_id: str) -> BatchState | None:
        return await self._queue.run(self._scripts.look(batch_id))

    async def _ensure(self, batch_id: str) -> None:
        """Without an answer the watchdog tries again."""
        try:
            if await in_thread(lambda: self._jobs.ensure(batch_id)):
                log.info("batch %s is to be run", batch_id)
        except QueueUnavailable as error:
            log.warning("batch %s has no job yet: %s", batch_id, error)
        except QueueError:
            log.exception("batch %s has no job yet", batch_id)

    async def _end_unknown(self, batch_id: str) -> None:
        """Redis has a batch and the disk has not: it was refused to its client, or is on another disk.

        Nothing can run it here. It is ended when its window is over and nobody else has done so.
        """
        state = await self._look(batch_id)
        if state is None or state.left_ms > 0:
            return
        owner = incarnation()
        taken = await self._queue.run(self._scripts.take(batch_id, owner, _END_LEASE_MS))
        if taken.code == "ok":
            end = self._scripts.end(batch_id, taken.epoch, owner, BatchStatus.EXPIRED, state.progress)
            code = await self._queue.run(end)
            log.warning("batch %s has no record on disk and expired: %s", batch_id, code)

    async def _note_of(self, key: str) -> keys.KeyNote:
        """What the key stands for; only ours until it is closed. Raise RequestError."""
        until = time.monotonic() + KEY_WAIT_S
        while (note := await in_thread(lambda: keys.KeyNote.take(self.root, key))) is None:
            if time.monotonic() > until:
                message = "the same request, under the same Idempotency-Key, is being worked on: ask again"
                raise RequestError(message, param="Idempotency-Key", code="idempotency_key_in_use", status=409)
            await asyncio.sleep(0.02)
        return note

    def _has_record(self, batch_id: str) -> bool:
        return is_batch_id(batch_id) and BatchFolder(self.root, batch_id).asked_at() > 0

    def _input(self, file_id: str) -> str:
        """The id of a file that a batch can be made of. Raise RequestError."""
        try:
            file = self.files.get(file_id)
        except FileMissing as error:
            raise RequestError(str(error), param="input_file_id", code="file_not_found") from None
        if file.purpose != "batch":
            message = f"input_file_id must be a file with purpose batch, not {file.purpose}"
            raise RequestError(message, param="input_file_id", code="invalid_value")
        if not file.bytes:
            raise RequestError("input_file_id is a file of 0 bytes", param="input_file_id", code="empty_file")
        return file.id

    def _delete(self, file_id: str) -> None:
        self.files.get(file_id)
        if batch_id := BatchFolder.reader_of(self.root, file_id):
            message = f"file {file_id} is the input of {batch_id}, which is not over: cancel that first"
            raise RequestError(message, param="file_id", code="file_in_use", status=409)
        self.files.delete(file_id)

    def _unfinished(self) -> Sequence[BatchFolder]:
        """Those that are old enough for their creator to have opened them."""
        before = time.time() - OPENING_S
        return [folder for folder in BatchFolder.unfinished(self.root) if folder.asked_at() < before]
