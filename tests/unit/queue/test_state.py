"""The state table: every legal and illegal event, and the same table in Lua."""

from __future__ import annotations

import itertools
import re

import pytest

from prelay_queue import state as state_module
from prelay_queue.errors import IllegalTransition
from prelay_queue.scripts import NAMES, source
from prelay_queue.state import SWEPT_IN, TRANSITIONS, Event, State, advance, as_lua

RUNNING = {State.PREFILL, State.STAGED, State.ADOPTING, State.DECODE}
LIVE = RUNNING | {State.QUEUED, State.PREEMPTED}

#: The table once more, event by event, written from the protocol's text and not from the code.
EXPECTED: dict[Event, dict[State, State]] = {
    Event.CLAIM: {State.QUEUED: State.PREFILL, State.STAGED: State.ADOPTING},
    Event.HANDOFF: {State.PREFILL: State.STAGED},
    Event.ADOPT: {State.PREFILL: State.DECODE, State.ADOPTING: State.DECODE},
    Event.EMIT: {State.DECODE: State.DECODE},
    Event.PREEMPT: dict.fromkeys(RUNNING, State.PREEMPTED),
    Event.REQUEUE: {State.PREEMPTED: State.QUEUED},
    Event.REAP: dict.fromkeys(RUNNING | {State.PREEMPTED}, State.QUEUED),
    Event.FINISH: dict.fromkeys(RUNNING, State.DONE),
    Event.CANCEL: dict.fromkeys(LIVE, State.DONE),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_each_event_moves_each_state_as_the_protocol_says_or_raises(state: State, event: Event) -> None:
    expected = EXPECTED[event].get(state)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{state} cannot {event}"):
            advance(state, event)
    else:
        assert advance(state, event) is expected


def test_nothing_leaves_done() -> None:
    assert not [key for key in TRANSITIONS if key[0] is State.DONE]


def test_every_state_is_reachable_from_queued() -> None:
    seen, todo = {State.QUEUED}, [State.QUEUED]
    while todo:
        here = todo.pop()
        for (start, _), to in TRANSITIONS.items():
            if start is here and to not in seen:
                seen.add(to)
                todo.append(to)
    assert seen == set(State)


def test_every_state_but_done_is_swept_and_done_is_not() -> None:
    assert set(SWEPT_IN) == set(State) - {State.DONE}
    assert set(SWEPT_IN.values()) == {"queued", "leases", "preempted"}


def test_every_owned_state_is_swept_by_its_lease() -> None:
    assert {state for state, index in SWEPT_IN.items() if index == "leases"} == RUNNING


def _lua_table(name: str, text: str) -> dict[str, str]:
    line = re.search(rf"^local {name} = \{{(.*)\}}$", text, re.MULTILINE)
    assert line is not None
    pairs = dict(re.findall(r'\["([a-z ]+)"\]="([a-z]+)"', line[1]))
    assert len(pairs) == line[1].count("=")  # nothing in the table that we did not read
    return pairs


def test_the_lua_tables_are_the_python_tables() -> None:
    text = as_lua()
    assert _lua_table("STEPS", text) == {f"{state} {event}": str(to) for (state, event), to in TRANSITIONS.items()}
    assert _lua_table("SWEPT", text) == {str(state): index for state, index in SWEPT_IN.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_script_carries_the_tables_once(name: str) -> None:
    assert source(name).count(as_lua()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_only_what_brings_new_work_may_be_refused_for_memory(name: str) -> None:
    first = source(name).partition("\n")[0]
    assert first.startswith("#!lua")
    assert ("allow-oom" in first) == (name not in ("submit", "batch_open"))
    assert ("no-writes" in first) == (name in ("view", "batch_look"))


@pytest.mark.parametrize("name", NAMES)
def test_scripts_only_use_states_and_events_of_the_table(name: str) -> None:
    body = source(name)
    for event in re.findall(r"(?:advance\([^,]+, |refusal\(id, ep, [^,]+, )'([a-z]+)'\)", body):
        assert event in set(Event)
    for state in re.findall(r"\bst == '([a-z]+)'", body):
        assert state in set(State)


def test_the_drawing_names_every_state_and_event() -> None:
    drawing = state_module.__doc__ or ""
    for word in (*State, *Event):
        if word is not Event.EMIT:
            assert word.upper() in drawing or word in drawing
