"""What the double remembers, as plain data: jobs, streams with their group, and all the rest of one partition."""

from __future__ import annotations

from dataclasses import dataclass, field

from prelay_queue.state import State

Entry = tuple[str, dict[str, str]]

#: The swept indexes, in the order in which a sweep goes through them for viewers.
INDEXES = ("queued", "leases", "preempted")


@dataclass
class Job:
    """One job and its answer. A field that a job has only at times is None, or '', while it has none."""

    id: str
    version: int
    epoch: int
    cls: str
    spec: str | None
    prompt_tokens: int
    max_tokens: int
    choices: int
    submitted_ms: int
    deadline_ms: int  # 0 is none
    attachments: list[str]
    form: str
    key: str
    log: list[tuple[int, int, str]]  # (epoch that wrote it, token, note); its place is the token's seq
    state: State = State.QUEUED
    owner: str = ""
    place: tuple[str, str] | None = None  # work stream and entry under which it waits
    claimed: str = ""  # "<work stream> <entry>" of the last claim
    claimed_ms: int | None = None  # first
    kv: str | None = None
    exporter: tuple[str, int] | None = None  # who holds the exported KV, and the epoch it is of
    unwanted: int | None = None  # epoch that an operator wants preempted
    preemptions: int = 0
    why: str | None = None
    failed_handovers: int = 0
    crashes: int = 0  # in company
    crashes_alone: int = 0
    crashed_at: int | None = None  # tokens that stood at the last crash
    resumes: dict[int, int] = field(default_factory=dict)  # epoch -> tokens that it began with
    reason: str | None = None
    error: str | None = None
    ended_ms: int | None = None
    expires_ms: int | None = None
    history: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for _, token, _ in self.log]

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _, _ in self.log]

    @property
    def notes(self) -> list[str]:
        """One for each token, or none when no token has one."""
        found = [note for _, _, note in self.log]
        return found if any(found) else []

    @property
    def apis(self) -> list[str]:
        """The API processes that watch, each once."""
        return list(dict.fromkeys(token.partition("#")[0] for token in self.attachments))

    def fields(self) -> dict[str, str]:
        """The job hash as keys.py describes it."""
        stream, entry = self.place or (None, None)
        exporter, exported = self.exporter or (None, None)
        found: dict[str, object] = {
            "v": self.version, "st": self.state, "ep": self.epoch, "ow": self.owner, "nx": len(self.log),
            "spec": self.spec, "pt": self.prompt_tokens, "mt": self.max_tokens, "n": self.choices, "cls": self.cls,
            "sub": self.submitted_ms, "dl": self.deadline_ms, "at": " ".join(self.attachments), "vw": self.form,
            "ik": self.key, "sk": stream, "si": entry, "ce": self.claimed or None, "cl": self.claimed_ms,
            "kv": self.kv, "kvo": exporter, "kve": exported,
            "wp": self.unwanted, "pe": self.preemptions, "why": self.why, "hf": self.failed_handovers or None,
            "cr": self.crashes, "ca": self.crashes_alone, "cs": self.crashed_at,
            "fin": self.reason, "err": self.error, "end": self.ended_ms,
            "tl": "\n".join(self.history),
            **{f"rs:{epoch}": count for epoch, count in self.resumes.items()},
        }  # fmt: skip
        return {name: str(value) for name, value in found.items() if value is not None}

    def entries(self) -> list[Entry]:
        """The log as its stream."""
        found: list[Entry] = [
            (f"{epoch}-{seq}", {"t": str(token)} | ({"x": note} if note else {}))
            for seq, (epoch, token, note) in enumerate(self.log)
        ]
        if self.reason is not None:
            found.append((f"{self.epoch}-{len(self.log)}", {"f": self.reason, "e": self.error or ""}))
        return found


@dataclass
class Group:
    """The consumer group of a work stream. An entry pends from its delivery until it is acknowledged."""

    delivered: tuple[int, int] = (0, 0)
    pending: dict[str, str] = field(default_factory=dict)  # entry -> consumer
    consumers: set[str] = field(default_factory=set)


@dataclass
class Stream:
    """Entries in order. Ids are '<ms>-<n>', always above the last."""

    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    last: tuple[int, int] = (0, 0)
    group: Group | None = None
    expires_ms: int | None = None

    def add(self, now_ms: int, fields: dict[str, str], most: int | None = None) -> str:
        """Append; beyond `most` the oldest go."""
        ms, n = self.last
        self.last = (now_ms, 0) if now_ms > ms else (ms, n + 1)
        entry = f"{self.last[0]}-{self.last[1]}"
        self.entries[entry] = fields
        while most is not None and len(self.entries) > most:
            del self.entries[next(iter(self.entries))]
        return entry

    def drop(self, entry: str) -> None:
        """Acknowledge and delete."""
        self.entries.pop(entry, None)
        if self.group is not None:
            self.group.pending.pop(entry, None)

    def deliver(self, consumer: str) -> Entry | None:
        """Hand the next entry to a consumer. There must be a group."""
        group = self.group
        assert group is not None, "NOGROUP"
        group.consumers.add(consumer)
        for entry, fields in self.entries.items():
            ms, _, n = entry.partition("-")
            if (int(ms), int(n)) > group.delivered:
                group.delivered = (int(ms), int(n))
                group.pending[entry] = consumer
                return entry, fields
        return None

    def take_over(self, consumer: str) -> list[Entry]:
        """Give all that pends to a consumer; what is deleted meanwhile pends no more."""
        group = self.group
        assert group is not None, "NOGROUP"
        group.consumers.add(consumer)
        group.pending = {entry: consumer for entry in group.pending if entry in self.entries}
        return [(entry, self.entries[entry]) for entry in group.pending]


@dataclass
class Drain:
    """How fast the queue drains: decayed sums over the jobs that ended while something waited."""

    touched_ms: int  # it is forgotten some time after
    since_ms: int | None = None  # the queue was empty last
    last_ms: int | None = None  # one ended
    jobs: float = 0.0
    ms: float = 0.0  # from claim to end
    tokens: float = 0.0  # of prompts
    slots: float = 0.0  # jobs that ran then
    due_ms: dict[str, float] = field(default_factory=dict)  # class -> what was promised last to one who was refused


@dataclass
class Partition:
    """All data of one partition. Streams are named by their whole key."""

    jobs: dict[str, Job] = field(default_factory=dict)
    #: queued, leases, preempted, deadlines, workers, apis: member -> score in server ms
    indexes: dict[str, dict[str, int]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    beats: dict[str, tuple[str, int]] = field(default_factory=dict)  # worker -> (JSON, when it expires)
    domains: set[str] = field(default_factory=set)
    drain: Drain | None = None
    keyed: dict[str, tuple[str, str, int]] = field(default_factory=dict)  # key -> (request, digest, when it expires)

    def index(self, name: str) -> dict[str, int]:
        return self.indexes.setdefault(name, {})

    def due(self, name: str, before_ms: float, limit: int | None) -> list[str]:
        """The first `limit` members up to a score, by score and then by name."""
        found = ((score, member) for member, score in self.index(name).items() if score <= before_ms)
        return [member for _, member in sorted(found)[:limit]]

    def waiting(self, cls: str) -> tuple[int, int]:
        """Jobs of a class that wait for a prefill, and tokens of their prompts."""
        prompts = [job.prompt_tokens for job in self.jobs.values() if job.state is State.QUEUED and job.cls == cls]
        return len(prompts), sum(prompts)

    def expire(self, now_ms: int) -> None:
        """Drop what has lived its time."""

        def over(expires_ms: int | None) -> bool:
            return expires_ms is not None and expires_ms <= now_ms

        for job in [each.id for each in self.jobs.values() if over(each.expires_ms)]:
            del self.jobs[job]
        for key in [key for key, (_, _, expires_ms) in self.keyed.items() if over(expires_ms)]:
            del self.keyed[key]
        for key in [key for key, stream in self.streams.items() if over(stream.expires_ms)]:
            del self.streams[key]
        for worker in [worker for worker, (_, expires_ms) in self.beats.items() if over(expires_ms)]:
            del self.beats[worker]
