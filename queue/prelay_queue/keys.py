"""Every Redis key and field, once.

All keys of a partition begin with `prelay:{<fleet>.<partition>}:`. The braces are the hash tag: on Redis
Cluster a partition is one slot, so a script may touch all of its keys. `fleet` is the model's fingerprint: two
fleets on one Redis never take each other's jobs. Scripts get the prefix as KEYS[1] and derive the rest.

job:<id>            hash     one job (one choice). Fields:
                               v    protocol version
                               st   state (state.py)
                               ep   epoch: number of the attempt, from 1
                               ow   owner: incarnation of the worker that may write; with ep the fence
                               nx   next: how many tokens of the answer are in the log. The truth about emission
                               spec the JobSpec as JSON; deleted at the end
                               pt   prompt tokens        mt   max_tokens        n    choices of the request
                               cls  priority class       sub  submit time, server ms
                               dl   deadline, server ms, 0 none
                               at   attachments "<api>#<token>", space separated: who is watching. An <api> that begins
                                    with `~` is a quiet viewer: its live stream has ends and preempts only
                               ik   key under which the client may send the request again, '' for none
                               vw   how the answer is shown (prelay_text/form.py), '' for a job of nobody's
                               sk   si   work stream and entry id under which the job waits
                               ce   "<work stream> <entry id>" of the last claim, so that a repeat is known as one
                               cl   first claim, server ms
                               kv   hand-over reference (opaque JSON) while STAGED or ADOPTING
                               kvo  incarnation that holds the exported KV; kve its epoch
                               wp   epoch that an operator wants preempted
                               pe   times preempted      why  cause of the last preempt
                               hf   hand-overs that failed in a row
                               cr   crashes in company   ca   crashes while alone     cs  `nx` at the last crash
                               rs:<ep>  the resume with which epoch <ep> began
                               fin  finish reason        err  error body (JSON)       end  end time, server ms
                               tl   history for people (history.py): `<server ms> <state> <epoch> <tokens> <worker or ->
                                    [why]` for each state it came to, the last 64 lines
                             PEXPIRE after the end (retention).
log:<id>            stream   the answer. Entry `<epoch>-<seq>`, field t = token id (and x = its note, note.py); the last
                             entry has f = finish reason (and e = error) at seq = number of tokens. PEXPIRE after
                             the end.
idem:<key>          hash     a request that may be sent again under this key: id, and dg = digest of its body. Kept as
                             long as its answer (24 h after the end, as its jobs then are)
queued              zset     jobs waiting for a prefill; score = server ms of the last check
leases              zset     jobs that a worker owns; score = server ms at which the lease ends
preempted           zset     jobs that wait for a requeue; score = server ms of the preempt
deadlines           zset     jobs that have a deadline and are not over; score = their `dl`
waiting             hash     the jobs of `queued`, counted: `<id>` = "<class> <prompt tokens>", and the sums of these,
                             `#jobs:<class>` and `#tokens:<class>`. One hash: it is lost as a whole or not at all
drain               hash     how fast the queue drains: since = server ms at which it was empty last; of the jobs that
                             ended while it was not, decayed sums: jobs = how many, ms = from claim to end, tokens =
                             of prompts, slots = jobs that ran; last = when one ended; due:<class> = server ms that was
                             promised last to one who was refused. PEXPIRE 1 h
work:prefill:<cls>:<r|n>             stream, group `g`: r = restarted, n = new. Fields id, tok (tokens to compute),
work:decode:<domain>:<cls>:<r|n>       al (1: run alone). Deleted at claim, so XLEN is the backlog. Never trimmed.
domains             set      KV domains that have had a decode stream
live:<api>          stream   fan-in of one API process: field e = JSON list of events. MAXLEN ~ 4096, NOMKSTREAM:
                             workers skip it when the API process is gone. EXPIRE 30 s, refreshed by its owner
apis                zset     API processes; score = server ms at which one was last heard of (`attend`). `reap` takes
                             the dead out, with their attachments
ctl:<worker>        stream   control of one worker: field c = JSON command. MAXLEN ~ 1000, EXPIRE 60 s
worker:<worker>     string   heartbeat, JSON (by `beat`); PX 15000
workers             zset     incarnations by last heartbeat, server ms
dead                stream   dead letters, MAXLEN ~ 1000: id, why, vw as above, and spec, '' if beyond 64 KiB
restarts            stream   for people: attempts that did not end their job, MAXLEN ~ 1000: id, ep, st (where it was),
                             ow, why, and lost: emitted tokens that were discarded
batch:<id>          hash     one batch (a file of requests). Its lines are jobs like any other. Fields:
                               rec  what was asked, JSON (opaque here)
                               st   status (batches.py)
                               ep   epoch: number of the runner, from 1
                               ow   owner: incarnation of the runner that may write; with ep the fence
                               lease  server ms at which the owner's right ends
                               total done failed   lines, as far as they are counted, served and refused
                               pt ct  tokens of prompts and of answers
                               created started finalizing cancelling ended   when it became so, server ms
                               exp  deadline, server ms
                               cx   1: it is to be cancelled
                               ofile efile errs    files of results and of errors, and why it failed (JSON); at the end
                             PEXPIRE 24 h after the end: what stays is on disk.
batches             zset     batches that are not over; score = their `created`

Where the batches' jobs stand (batch_jobs.py), possibly on another server: RQ's own keys `rq:…`, of the queue
`prelay-batch-<fleet>`, and `prelay-batch:{<fleet>}:lock:<id>` and `…:moving:<id>`, of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .job import Priority

#: Name of the one consumer group on every work stream.
GROUP = "g"

#: Streams of one stage are served in this order: a restarted job before a new one of its class.
CLASS_ORDER = tuple(f"{cls}:{kind}" for cls in Priority for kind in ("r", "n"))


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one partition of one fleet."""

    fleet: str
    partition: int = 0

    @property
    def prefix(self) -> str:
        return f"prelay:{{{self.fleet}.{self.partition}}}:"

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{job_id}"

    def log(self, job_id: str) -> str:
        return f"{self.prefix}log:{job_id}"

    def keyed(self, key: str) -> str:
        """Where a request that may be sent again under `key` is noted."""
        return f"{self.prefix}idem:{key}"

    @property
    def queued(self) -> str:
        return f"{self.prefix}queued"

    @property
    def leases(self) -> str:
        return f"{self.prefix}leases"

    @property
    def preempted(self) -> str:
        return f"{self.prefix}preempted"

    @property
    def deadlines(self) -> str:
        return f"{self.prefix}deadlines"

    @property
    def waiting(self) -> str:
        return f"{self.prefix}waiting"

    @property
    def drain(self) -> str:
        return f"{self.prefix}drain"

    @property
    def domains(self) -> str:
        return f"{self.prefix}domains"

    @property
    def workers(self) -> str:
        return f"{self.prefix}workers"

    @property
    def dead(self) -> str:
        return f"{self.prefix}dead"

    @property
    def restarts(self) -> str:
        return f"{self.prefix}restarts"

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}batch:{batch_id}"

    @property
    def batches(self) -> str:
        return f"{self.prefix}batches"

    def work(self, stage: str) -> tuple[str, ...]:
        """Return the work streams of `stage` ("prefill" or "decode:<domain>") in serving order."""
        return tuple(f"{self.prefix}work:{stage}:{tail}" for tail in CLASS_ORDER)

    def live(self, api: str) -> str:
        return f"{self.prefix}live:{api}"

    @property
    def apis(self) -> str:
        return f"{self.prefix}apis"

    def control(self, worker: str) -> str:
        return f"{self.prefix}ctl:{worker}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"
