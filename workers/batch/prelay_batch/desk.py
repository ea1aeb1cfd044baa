"""What a runner asks the queue about its jobs, many in one round trip. Raises QueueUnavailable, QueueError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from redis.exceptions import RedisError

from prelay_queue.client import SyncQueue, translate
from prelay_queue.errors import QueueError, QueueUnavailable
from prelay_queue.events import LogView
from prelay_queue.job import Priority
from prelay_queue.keys import CLASS_ORDER
from prelay_queue.log import read_ended
from prelay_queue.scripts import Call, NewJob, text

from .window import Backlog

T = TypeVar("T")

#: Calls in one round trip.
AT_ONCE = 64

_BATCH_STREAMS = tuple(tail for tail in CLASS_ORDER if tail.startswith(f"{Priority.BATCH}:"))


class Desk:
    """The jobs as the queue has them. All are watched in the name of `attachment`. Keeps no state."""

    def __init__(self, queue: SyncQueue, attachment: str) -> None:
        self.attachment = attachment
        self._queue = queue
        self._scripts = queue.scripts
        self._keys = queue.keys

    def submit(self, requests: Sequence[Sequence[NewJob]]) -> list[tuple[str, ...] | QueueError]:
        """For each request new | exists of each of its jobs, or why it was refused."""
        return self._ask([self._scripts.submit(jobs) for jobs in requests])

    def watch(self, jobs: Sequence[str]) -> None:
        """Hear of these too, which are there already."""
        for answer in self._ask([self._scripts.attach(job, self.attachment) for job in jobs]):
            _sound(answer)

    def known(self, jobs: Sequence[str]) -> list[bool]:
        """Which of these are there? Those are then watched."""
        answers = self._ask([self._scripts.attach(job, self.attachment) for job in jobs])
        return [_sound(answer) is not None for answer in answers]

    def states(self, jobs: Sequence[str]) -> list[tuple[str, int]]:
        """State and epoch of each; '' for one that Redis does not know."""
        found: list[tuple[str, int]] = []
        for group in groups(jobs):
            rows = self._pipeline([("HMGET", self._keys.job(job), "st", "ep") for job in group])
            found += [("", 0) if state is None else (text(state), int(epoch)) for state, epoch in rows]
        return found

    def views(self, jobs: Sequence[str]) -> list[LogView | None]:
        """What stands of each; None for one that Redis does not know."""
        found = {
            job: view for group in groups(jobs) for job, view in zip(group, read_ended(self._queue, group), strict=True)
        }
        others = [job for job in jobs if found[job] is None]  # they run again, or are gone
        found |= zip(others, map(_sound, self._ask([self._scripts.view(job) for job in others])), strict=True)
        return [found[job] for job in jobs]

    def requeue(self, jobs: Sequence[tuple[str, int]]) -> None:
        """Send preempted jobs back to their first step, keeping all their tokens: nobody has seen any."""
        self._ask([self._scripts.requeue(job, epoch, -1, self.attachment) for job, epoch in jobs])

    def cancel(self, jobs: Sequence[str]) -> list[str]:
        """Watch these no more, and end them if nobody else does: ended | watched | done | gone."""
        return [_sound(answer) for answer in self._ask([self._scripts.cancel(job, self.attachment) for job in jobs])]

    def forget(self, jobs: Sequence[str]) -> None:
        """Remove jobs that are over, and that nobody reads any more. The queue would keep them for minutes."""
        for group in groups(jobs):
            names = [name for job in group for name in (self._keys.job(job), self._keys.log(job))]
            self._pipeline([("UNLINK", *names)])

    def backlog(self) -> Backlog:
        """How many jobs of the batch class wait for a prefill, and how many ever did."""
        try:
            with self._queue.redis.pipeline(transaction=False) as pipe:
                for tail in _BATCH_STREAMS:
                    pipe.xinfo_stream(f"{self._keys.prefix}work:prefill:{tail}")
                found: list[Any] = pipe.execute(raise_on_error=False)
        except RedisError as error:
            raise translate(error) from None
        streams = [each for each in found if not isinstance(each, Exception)]  # the others are not there yet
        return Backlog(sum(each["length"] for each in streams), sum(each["entries-added"] for each in streams))

    def _ask(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """An answer for each call. Raise what makes all of them uncertain."""
        found: list[Any] = []
        for group in groups(calls):
            answers = self._queue.run_many(group)
            for answer in answers:
                if isinstance(answer, QueueUnavailable):
                    raise answer
            found += answers
        return found

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            with self._queue.redis.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(pipe.execute())
        except RedisError as error:
            raise translate(error) from None


def _sound(answer: Any) -> Any:
    if isinstance(answer, QueueError):
        raise answer
    return answer


def groups(items: Iterable[T], size: int = AT_ONCE) -> Iterator[list[T]]:
    """The items in lists of up to `size`."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
