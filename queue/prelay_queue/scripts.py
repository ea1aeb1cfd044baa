"""One typed stub per Lua script: pure encoding and decoding, no I/O.

`Scripts(keys).emit(…)` returns a `Call`; `SyncQueue.run` and `AsyncQueue.run` (client.py) send it. Every script is
safe to send twice and answers definitely the second time, so the client may retry.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

import orjson

from .errors import QueueBusy, SentBefore
from .events import LogView
from .job import PROTOCOL_VERSION, Claim, JobSpec
from .keys import Keys
from .lua_library import needed
from .state import as_lua

R = TypeVar("R")

JOB_SCRIPTS = (
    "submit", "claim", "handoff", "adopt", "emit", "preempt", "requeue", "renew", "finish", "cancel", "reap",
    "expire", "view", "attach", "beat", "tidy", "disown", "attend", "evict",
)  # fmt: skip
#: Their stubs are in batches.py.
BATCH_SCRIPTS = ("batch_open", "batch_take", "batch_keep", "batch_end", "batch_cancel", "batch_look", "batch_stale")
NAMES = (*JOB_SCRIPTS, *BATCH_SCRIPTS)

#: Only what brings new work may be refused for memory: what drains the server must always run.
_FLAGS = {
    "submit": "#!lua",
    "batch_open": "#!lua",
    "view": "#!lua flags=no-writes,allow-oom",
    "batch_look": "#!lua flags=no-writes,allow-oom",
}


@cache
def source(name: str) -> str:
    """Return the whole Lua source of a script: flags, state table, what it needs of the libraries, body."""
    folder = resources.files(__package__) / "lua"
    flags = _FLAGS.get(name, "#!lua flags=allow-oom")
    parts = ("_lib", "_batch") if name.startswith("batch_") else ("_lib",)
    library = "".join((folder / f"{part}.lua").read_text() for part in parts)
    body = (folder / f"{name}.lua").read_text()
    return "\n".join((flags, as_lua(), needed(library, body), body))


@cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One script call: what to send, and how to read the answer."""

    name: str
    prefix: str
    args: tuple[str | bytes | int, ...]
    decode: Callable[[Any], R]


@dataclass(frozen=True, slots=True)
class Attached:
    """A job as a new viewer finds it. `spec` is empty once it is over; times are in ms, 0 is none."""

    state: str
    form: str
    spec: bytes
    choices: int
    ttl_ms: int  # to the deadline
    forgotten_ms: int  # until Redis forgets it


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. `epoch` and `ids` are beyond 1 and empty only when Redis lost the job.

    `ends_at` is when the answer must be complete by this process's monotonic clock, seconds; 0: whenever. What is sent
    is the time that is left, so that a job which Redis lost comes back with the deadline that it had.
    """

    spec: JobSpec
    attachment: str = ""  # "<api>#<token>"
    choices: int = 1
    ends_at: float = 0.0
    epoch: int = 1
    ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # one for each of `ids`, or none (note.py)
    form: str = ""  # how the answer is shown; kept as long as the answer, and read by no worker
    key: str = ""  # under which the client may send the request again; '' for none
    digest: str = ""  # of what it sent under that key

    @property
    def left_ms(self) -> int:
        """Time to the deadline, at least 1; 0 when there is none."""
        return max(1, math.ceil((self.ends_at - time.monotonic()) * 1000)) if self.ends_at else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.spec.id,
            "spec": self.spec.encode().decode(),
            "cls": self.spec.priority,
            "pt": len(self.spec.prompt_ids),
            "mt": self.spec.sampling.max_tokens,
            "n": self.choices,
            "ttl": self.left_ms,
            "at": self.attachment,
            "vw": self.form,
            "ik": self.key,
            "dg": self.digest,
            "ep": self.epoch,
            "ids": list(self.ids),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens seq … of one job at one epoch, each with a note (note.py), or none with one."""

    job: str
    epoch: int
    seq: int
    ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Emitted:
    """Answer to one emission: `ok` and the log's next seq, or why not."""

    code: str
    next: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim. `claim` is set only with `ok`; stale, back, newer and ended need nothing more."""

    code: str
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Requeued:
    """Answer to a requeue: `ok`, or `lost` to another's requeue (with its epoch and resume), `done`, `gone`."""

    code: str
    epoch: int
    resume: int


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a sweep gave back, as job ids."""

    reaped: tuple[str, ...] = ()
    requeued: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """One item of a renewal: `run` = I own the attempt, `export` = I hold its KV."""

    job: str
    epoch: int
    kind: str


def text(raw: Any) -> str:
    """Decode a reply that is bytes, or a string already."""
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(text(item) for item in raw)


def _submitted(raw: Any) -> tuple[str, ...]:
    answers = list(raw)
    if answers and text(answers[0]) == "busy":
        _, cls, kind, waiting, asked, limit, retry_ms = answers
        raise QueueBusy(text(cls), text(kind), int(waiting), int(asked), int(limit), int(retry_ms))
    if answers and text(answers[0]) in ("kept", "other"):
        raise SentBefore(text(answers[1]), same=text(answers[0]) == "kept")
    return _texts(answers)


def _claimed(raw: Any) -> Claimed:
    code = text(raw[0])
    if code != "ok":
        return Claimed(code)
    _, epoch, spec, kv, preempts, alone_until, submitted, deadline, failed, ids = raw
    claim = Claim(
        spec=JobSpec.decode(spec),
        epoch=int(epoch),
        ids=tuple(ids),
        kv=kv if isinstance(kv, bytes) else str(kv).encode(),
        preemptions=int(preempts),
        alone_until=int(alone_until),
        submitted_ms=int(submitted),
        deadline_ms=int(deadline),
        failed_handovers=int(failed),
    )
    return Claimed(code, claim)


def _view(raw: Any) -> LogView | None:
    if raw is None:
        return None
    state, epoch, resume, reason, error, ids, notes, epochs = raw
    return LogView(
        int(epoch), text(state), tuple(ids), int(resume), text(reason), text(error), _texts(notes), tuple(epochs)
    )


def _attached(raw: Any) -> Attached | None:
    if raw is None:
        return None
    state, form, spec, choices, ttl_ms, forgotten_ms = raw
    return Attached(text(state), text(form), bytes(spec), int(choices), int(ttl_ms), int(forgotten_ms))


class Scripts:
    """The scripts of one partition: twelve are the protocol of a job, `view` only looks, the rest is about processes.

    The contract of each stands at the top of its Lua file.
    """

    def __init__(
        self, keys: Keys, max_jobs: Mapping[str, int] | None = None, max_tokens: Mapping[str, int] | None = None
    ) -> None:
        """`max_jobs`, `max_tokens`: how much may wait, by class, when `submit` comes (see QueueSettings)."""
        self.keys = keys
        self._max_jobs, self._max_tokens = max_jobs or {}, max_tokens or {}

    def _call(self, name: str, decode: Callable[[Any], R], *args: str | bytes | int) -> Call[R]:
        return Call(name, self.keys.prefix, args, decode)

    def submit(self, jobs: Sequence[NewJob]) -> Call[tuple[str, ...]]:
        """new | exists per job of one request, which is of one class. All or none: raises QueueBusy when too much waits
        already, QueueFull when Redis is over its memory limit, SentBefore for a key that another request has."""
        payload = orjson.dumps([job.as_dict() for job in jobs])
        cls = jobs[0].spec.priority if jobs else ""
        limits = self._max_jobs.get(cls, 0), self._max_tokens.get(cls, 0)
        return self._call("submit", _submitted, payload, PROTOCOL_VERSION, *limits)

    def claim(self, stream: str, entry: str, job: str, owner: str, lease_ms: int, place: bool = True) -> Call[Claimed]:
        """Take (or, with place=False, put back) the job that `entry` of `stream` named."""
        return self._call("claim", _claimed, stream, entry, job, owner, lease_ms, int(place), PROTOCOL_VERSION)

    def handoff(
        self,
        job: str,
        epoch: int,
        owner: str,
        seq: int,
        token: int,
        kv: bytes,
        domain: str,
        lease_ms: int,
        note: str = "",
    ) -> Call[str]:
        """Emit the first token and stage the job: ok | fenced | done | gone | illegal | gap."""
        return self._call("handoff", text, job, epoch, owner, seq, token, kv, domain, lease_ms, note)

    def adopt(self, job: str, epoch: int, owner: str) -> Call[str]:
        """The KV is ours; the source may be freed: ok | fenced | done | gone | illegal."""
        return self._call("adopt", text, job, epoch, owner)

    def emit(self, owner: str, emissions: Sequence[Emission]) -> Call[list[Emitted]]:
        """Write the tokens of one step; an answer per emission."""
        payload = orjson.dumps([(e.job, e.epoch, e.seq, e.ids, *((e.notes,) if e.notes else ())) for e in emissions])
        return self._call("emit", lambda raw: [Emitted(text(c), int(n)) for c, n in raw], owner, payload)

    def preempt(self, job: str, epoch: int, owner: str, reason: str) -> Call[str]:
        """Give the attempt up (its KV is free; a staged job's will be, on ok): ok | fenced | done | gone | illegal."""
        return self._call("preempt", text, job, epoch, owner, reason)

    def requeue(self, job: str, epoch: int, resume: int, token: str = "") -> Call[Requeued]:
        """Back to step 1 after a preempt. `resume` -1, or any but the sole attachment, keeps all emitted."""
        return self._call("requeue", lambda r: Requeued(text(r[0]), int(r[1]), int(r[2])), job, epoch, resume, token)

    def renew(
        self, owner: str, lease_ms: int, held: Sequence[Held], stranded_ms: int = 30_000
    ) -> Call[tuple[str, ...]]:
        """Per item: run → kept | done | lost; export → hold | release.

        What has waited staged for `stranded_ms` without a live decode worker goes back to step 1, if others can run it.
        """
        payload = orjson.dumps([(h.job, h.epoch, h.kind) for h in held])
        return self._call("renew", _texts, owner, lease_ms, payload, stranded_ms)

    def finish(
        self,
        job: str,
        epoch: int,
        owner: str,
        seq: int,
        ids: Sequence[int],
        reason: str,
        error: str = "",
        notes: Sequence[str] = (),
    ) -> Call[str]:
        """The last tokens and the terminal event: ok | fenced | done | gone | illegal | gap."""
        said = orjson.dumps(list(ids)), reason, error, orjson.dumps(list(notes))
        return self._call("finish", text, job, epoch, owner, seq, *said)

    def cancel(self, job: str, token: str = "") -> Call[str]:
        """Detach a viewer; the last one ends the job; '' ends it at once: ended | watched | done | gone."""
        return self._call("cancel", text, job, token)

    def reap(
        self,
        limit: int,
        preempt_grace_ms: int,
        queued_check_ms: int,
        max_alone_crashes: int,
        error: str,
        latest_ms: int = 0,
        api_grace_ms: int = 30_000,
    ) -> Call[Reaped]:
        """Give back expired leases, unanswered preempts, lost stream entries and what only dead API processes watch.

        Nothing after `latest_ms` (server time; 0: whenever).
        """
        return self._call(
            "reap",
            lambda raw: Reaped(*(_texts(ids) for ids in raw)),
            limit, preempt_grace_ms, queued_check_ms, max_alone_crashes, error, latest_ms, api_grace_ms,
        )  # fmt: skip

    def expire(self, limit: int) -> Call[tuple[str, ...]]:
        """End the jobs that are past their deadline, whoever has them: their ids."""
        return self._call("expire", _texts, limit)

    def view(self, job: str) -> Call[LogView | None]:
        """Look at a job: its state and all its tokens. None when Redis does not know it."""
        return self._call("view", _view, job)

    def attach(self, job: str, attachment: str) -> Call[Attached | None]:
        """Watch a job: what one has to know to show its answer. None when Redis does not know it."""
        return self._call("attach", _attached, job, attachment)

    def beat(self, worker: str, status: Mapping[str, Any], ttl_ms: int) -> Call[int]:
        """Say that a worker lives and how it stands: the server's time in ms, which is in the heartbeat too."""
        assert status, "the script adds a field to it"
        return self._call("beat", int, worker, orjson.dumps(status), ttl_ms)

    def evict(self, job: str) -> Call[tuple[str, str, int]]:
        """Ask whoever runs the job to give this attempt up: (state, owner asked or '', epoch); state may be gone."""
        return self._call("evict", lambda raw: (text(raw[0]), text(raw[1]), int(raw[2])), job)

    def attend(self, api: str, ttl_s: int, *, begin: bool) -> Call[tuple[str, int]]:
        """Say that an API process lives; with `begin` make its live stream: the entry to read on from, server ms."""
        return self._call("attend", lambda raw: (text(raw[0]), int(raw[1])), api, ttl_s, int(begin))

    def disown(self, prefix: str) -> Call[int]:
        """End the leases of workers that are known to be dead, by the beginning of their incarnation: how many."""
        return self._call("disown", int, prefix)

    def tidy(self) -> Call[int]:
        """Remove the consumers of workers that are gone: how many."""
        return self._call("tidy", int)
