"""The life of a job: one transition table, used by Python and rendered into every Lua script.

    submit ──> QUEUED ──claim──> PREFILL ──handoff──> STAGED ──claim──> ADOPTING ──adopt──> DECODE ──finish──> DONE
                 ^                  │ └─adopt (unified)──────────────────────────────────────^ │
                 │                  │                    │                 │                  │
                 └────requeue────PREEMPTED <──preempt────┴─────────────────┴──────────────────┘

`finish` ends a job that is owned; `cancel` ends it from any state. `reap` of a lost lease goes back to QUEUED, or ends
the job when it crashed too often. A deadline ends a job in any state, by `expire`; `claim` looks at it too. These
endings, and that of a restarted answer which is complete already, go to DONE without an event of the table.
"""

from __future__ import annotations

from enum import StrEnum

from .errors import IllegalTransition


class State(StrEnum):
    """Where a job is. Every state but DONE stands in exactly one swept index (`SWEPT_IN`)."""

    QUEUED = "queued"
    PREFILL = "prefill"
    STAGED = "staged"
    ADOPTING = "adopting"
    DECODE = "decode"
    PREEMPTED = "preempted"
    DONE = "done"


class Event(StrEnum):
    """What can happen to a job."""

    CLAIM = "claim"
    HANDOFF = "handoff"
    ADOPT = "adopt"
    EMIT = "emit"
    PREEMPT = "preempt"
    REQUEUE = "requeue"
    REAP = "reap"
    FINISH = "finish"
    CANCEL = "cancel"


_S, _E = State, Event
_RUNNING = (_S.PREFILL, _S.STAGED, _S.ADOPTING, _S.DECODE)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.QUEUED, _E.CLAIM): _S.PREFILL,
    (_S.PREFILL, _E.HANDOFF): _S.STAGED,
    (_S.PREFILL, _E.ADOPT): _S.DECODE,  # a unified worker moves the job to itself
    (_S.STAGED, _E.CLAIM): _S.ADOPTING,
    (_S.ADOPTING, _E.ADOPT): _S.DECODE,
    (_S.DECODE, _E.EMIT): _S.DECODE,
    (_S.PREEMPTED, _E.REQUEUE): _S.QUEUED,
    **{(state, _E.PREEMPT): _S.PREEMPTED for state in _RUNNING},
    **{(state, _E.REAP): _S.QUEUED for state in (*_RUNNING, _S.PREEMPTED)},
    **{(state, _E.FINISH): _S.DONE for state in _RUNNING},  # who gave the job up may not end it
    **{(state, _E.CANCEL): _S.DONE for state in State if state is not _S.DONE},
}

#: The index that a sweep finds the job by; each is a sorted set scored in server milliseconds.
SWEPT_IN: dict[State, str] = {
    _S.QUEUED: "queued",
    **dict.fromkeys(_RUNNING, "leases"),
    _S.PREEMPTED: "preempted",
}


def advance(state: State, event: Event) -> State:
    """Return the state after `event`; raise IllegalTransition, changing nothing, when there is none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a job that is {state} cannot {event}") from None


def as_lua() -> str:
    """Render both tables as Lua source."""
    steps = ", ".join(f'["{state} {event}"]="{to}"' for (state, event), to in TRANSITIONS.items())
    swept = ", ".join(f'["{state}"]="{index}"' for state, index in SWEPT_IN.items())
    return f"local STEPS = {{{steps}}}\nlocal SWEPT = {{{swept}}}\n"
