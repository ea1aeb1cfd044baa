"""When a dead child is started again."""

from __future__ import annotations

from prelay.restart import FAST_FAILURES_MAX, LONGEST_DELAY_S, Again, GiveUp, RestartPolicy, describe


def test_the_wait_doubles_with_each_failure_in_a_row_up_to_a_limit() -> None:
    policy = RestartPolicy()
    decisions = [policy.on_exit(20, -9, started_up=True) for _ in range(12)]
    delays = [decision.delay_s for decision in decisions if isinstance(decision, Again)]
    assert len(delays) == 12
    assert delays[:4] == [0.2, 0.4, 0.8, 1.6]
    assert delays[-1] == LONGEST_DELAY_S


def test_a_healthy_minute_forgets_earlier_failures() -> None:
    policy = RestartPolicy()
    for _ in range(5):
        policy.on_exit(1, -9, started_up=True)
    assert policy.on_exit(61, -9, started_up=True) == Again(0.2)
    assert repr(policy) == "RestartPolicy(failures=1, fast_failures=0)"


def test_more_than_the_allowed_fast_failures_in_a_row_give_up() -> None:
    policy = RestartPolicy()
    decisions = [policy.on_exit(1, 1, started_up=True) for _ in range(FAST_FAILURES_MAX + 1)]
    assert all(isinstance(decision, Again) for decision in decisions[:-1])
    assert decisions[-1] == GiveUp(f"failed {FAST_FAILURES_MAX + 1} times in a row, last with exit code 1")


def test_slow_crashes_never_end_the_service() -> None:
    policy = RestartPolicy()
    assert all(isinstance(policy.on_exit(15, -6, started_up=True), Again) for _ in range(100))


def test_before_the_service_was_ready_a_child_that_says_it_cannot_run_is_believed() -> None:
    assert RestartPolicy().on_exit(1, 1, started_up=False) == GiveUp("cannot run (exit code 1)")
    assert isinstance(RestartPolicy().on_exit(1, -9, started_up=False), Again)
    assert isinstance(RestartPolicy().on_exit(1, 1, started_up=True), Again)


def test_bad_usage_never_gets_better() -> None:
    assert RestartPolicy().on_exit(100, 2, started_up=True) == GiveUp("cannot run (exit code 2)")


def test_exit_codes_are_said_in_words() -> None:
    assert [describe(code) for code in (0, 1, -9, -200)] == [
        "exit code 0",
        "exit code 1",
        "signal SIGKILL",
        "signal 200",
    ]
