"""Which path is chosen, and that the reason says what to change."""

from __future__ import annotations

import pytest

from prelay_kv.cuda.paths import AUTO, CUDA_IPC, PINNED, Facts, ProbeResult, choose

WORKS = ProbeResult(True)
FAILED = ProbeResult(False, "cudaIpcOpenMemHandle: cudaErrorOperatingSystem (304)", 304)

#: Facts that speak against mapping the GPU's memory, and what the reason must say of each.
OBJECTIONS = [
    (Facts(mig=True), "whole card"),
    (Facts(probe=FAILED), "cudaErrorOperatingSystem (304)); run the workers as one user"),
    (Facts(without_peer_access=(1, 3), probe=WORKS), "from 1, 3; hide those (CUDA_VISIBLE_DEVICES)"),
]


def test_where_nothing_speaks_against_it_the_gpu_s_memory_is_mapped() -> None:
    path = choose(AUTO, Facts(probe=WORKS))
    assert path.kind == CUDA_IPC
    assert "another process could read" in path.reason


def test_without_a_probe_the_reason_claims_none() -> None:
    path = choose(AUTO, Facts())
    assert path.kind == CUDA_IPC
    assert "could read" not in path.reason


@pytest.mark.parametrize(("facts", "words"), OBJECTIONS)
def test_any_objection_leads_to_host_memory_and_is_the_reason(facts: Facts, words: str) -> None:
    path = choose(AUTO, facts)
    assert path.kind == PINNED
    assert words in path.reason


@pytest.mark.parametrize(("facts", "words"), OBJECTIONS)
def test_what_was_asked_for_is_taken_against_all_objections_and_warned_of(facts: Facts, words: str) -> None:
    path = choose(CUDA_IPC, facts)
    assert path.kind == CUDA_IPC
    assert "asked for, but" in path.reason
    assert words in path.reason


def test_what_was_asked_for_and_works_is_not_warned_of() -> None:
    assert "but" not in choose(CUDA_IPC, Facts(probe=WORKS)).reason


@pytest.mark.parametrize("facts", [Facts(), Facts(probe=WORKS), *(facts for facts, _ in OBJECTIONS)])
def test_host_memory_is_never_refused(facts: Facts) -> None:
    path = choose(PINNED, facts)
    assert (path.kind, path.reason) == (PINNED, "it was asked for")


def test_a_slice_of_a_card_is_said_first_as_it_explains_the_rest() -> None:
    reason = choose(AUTO, Facts(mig=True, without_peer_access=(1,), probe=FAILED)).reason
    assert "MIG" in reason
    assert "304" not in reason


def test_a_probe_that_failed_without_an_error_of_the_runtime_has_advice_too() -> None:
    reason = choose(AUTO, Facts(probe=ProbeResult(False, "no answer in 10 s"))).reason
    assert "(no answer in 10 s); let two processes" in reason


@pytest.mark.parametrize("asked", [AUTO, CUDA_IPC, PINNED])
@pytest.mark.parametrize("facts", [Facts(), Facts(probe=WORKS), *(facts for facts, _ in OBJECTIONS)])
def test_a_reason_is_one_line(asked: str, facts: Facts) -> None:
    assert len(choose(asked, facts).reason.splitlines()) == 1


@pytest.mark.parametrize("asked", ["", "shm", "CUDA_IPC"])
def test_another_word_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=f"not {asked!r}"):
        choose(asked, Facts())
