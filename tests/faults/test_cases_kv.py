"""Public faults of preemption and of the KV hand-over, as tests: usage, pools, health, dead and lying exporters."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.chain import Listener, check_stream, usage
from tests.bed.http import get, post
from tests.bed.processes import again_and_again, until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Site, body, first_after, is_ready, restarted, site
from tests.faults.forked import ApiProcess
from tests.faults.jobs import jobs, running
from tests.faults.traffic import COMPLETIONS


def preempts(here: Site) -> list[int]:
    return [int(job.get("pe", 0)) for job in jobs(here).values()]


# --- preempts, and what the client counts


def test_sixteen_streams_that_are_all_preempted_are_those_of_an_empty_fleet(shared_server: Server) -> None:
    """Case 1, vllm#38624 and vllm#42117: after a preempt a greedy stream differs, repeats tokens or lacks some.

    The pool holds two answers and a half, and an operator sees to it that nobody is spared.
    """
    with site(shared_server, null=NullModel(step_ms=20)) as here:
        here.start(Role.PREFILL, blocks=512)
        here.start(Role.DECODE, blocks=30)
        here.until_ready()
        crowd = here.crowd(here.api(), 16, max_tokens=40)

        def spare_nobody() -> None:
            for job, fields in jobs(here).items():
                if fields["st"] == "decode" and fields.get("pe", "0") == "0" and int(fields["nx"]) > 4:
                    here.queue.run(here.queue.scripts.evict(job))

        here.nudge = spare_nobody
        here.wait(lambda: crowd.done, 90)
        assert len(here.check_crowds()) == 16
        assert len(preempts(here)) == 16
        assert min(preempts(here)) >= 1
        here.check_nothing_left()


def preempt_twice(here: Site, api: ApiProcess, job: str) -> None:
    """By an operator, each attempt after some tokens."""
    for attempt in ("1", "2"):
        run = bound(lambda n: int(jobs(here)[job]["nx"]) > 12 * int(n) and jobs(here)[job]["st"] == "decode", attempt)
        until(run, every_s=0.005)
        assert post(f"{api.url}/admin/jobs/{job.partition('/')[0]}/preempt").status_code == 202
        until(bound(lambda n: jobs(here)[job]["ep"] > n, attempt))


def test_after_two_preempts_the_usage_is_what_the_client_received_once(shared_server: Server) -> None:
    """Case 4, inference-sim#1091: tokens that were computed again after a preempt are counted again."""
    tokens = 80
    with site(shared_server) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api()
        prompt = list(range(7))
        asked = {**body(prompt, tokens), "stream_options": {"include_usage": True}}
        listener = Listener(api.url, COMPLETIONS, asked)
        (job,) = until(lambda: jobs(here))
        preempt_twice(here, api, job)
        found = listener.end()
        check_stream(found, prompt, tokens, divergent=True)
        assert found.frames[-2].id.startswith("3-")
        assert [each["usage"] for each in found.bodies if each.get("usage")] == [usage(7, tokens)]

        with ThreadPoolExecutor(1) as pool:  # the same in one piece, of which nothing is delivered before the end
            whole = pool.submit(post, api.url + COMPLETIONS, json=body(prompt, tokens), timeout=60)
            (job,) = until(lambda: [name for name in jobs(here) if name != job])
            preempt_twice(here, api, job)
            assert whole.result().json()["usage"] == usage(7, tokens)
        assert preempts(here) == [2, 2]
        here.check_nothing_left()


# --- pools of all sizes


def test_what_the_pool_cannot_hold_is_refused_at_once_and_a_tiny_prompt_then_served(shared_server: Server) -> None:
    """Case 8, vllm#39734: a prompt of one token more than the pool waits for ever, and all others behind it.

    Also a prompt that fits when its answer does not. Nothing of either gets into the queue.
    """
    with site(shared_server) as here:
        here.start(Role.PREFILL, blocks=64, max_model_len=4096)  # the model itself could read more
        here.start(Role.DECODE, blocks=20, max_model_len=4096)  # 80 tokens
        here.until_ready()
        api = here.api()
        for size, answer in ((81, 1), (80, 1), (60, 21), (1, 80), (81, None)):
            for streaming in (True, False):
                asked = time.monotonic()
                more = {} if answer is None else {"max_tokens": answer}
                request = {"model": "null", "prompt": [1] * size, "stream": streaming, **more}
                reply = post(api.url + COMPLETIONS, json=request)
                assert time.monotonic() - asked < 2
                assert reply.status_code == 400, (size, answer)
                assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert jobs(here) == {}
        here.crowd(api, 1, max_tokens=3)
        here.check_crowds(20)
        reply = post(api.url + COMPLETIONS, json={"model": "null", "prompt": [1] * 60, "max_tokens": 20})
        assert reply.json()["usage"] == usage(60, 20)
        here.check_nothing_left()


def test_fifty_requests_pass_through_a_tiny_decode_pool_behind_a_large_prefill_pool(shared_server: Server) -> None:
    """Case 9, sglang#6857: prefill keeps handing over what decode has no room for, and nobody gets on."""
    with site(shared_server, null=replace(DIVERGENT, step_ms=2)) as here:
        here.start(Role.PREFILL, blocks=4096)
        here.start(Role.DECODE, blocks=20)  # two answers and a half
        here.until_ready()
        here.crowd(here.api(), 50, max_tokens=24)
        assert len(here.check_crowds(100)) == 50
        assert 1 <= max(preempts(here)) <= 3
        here.check_nothing_left()


# --- the prefill worker dies


def test_a_killed_prefill_worker_is_replaced_and_no_decode_worker_restarts(shared_server: Server) -> None:
    """Case 18, sglang#16903: after a prefill server died, decode is stuck with its connection until it restarts too.

    What decodes goes on undisturbed, what was being prefilled or waited comes back, and new requests are served.
    """
    with site(shared_server, null=replace(DIVERGENT, prefill_ms_per_token=20)) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        prefill, decode = here.workers
        api = here.api()
        streaming = here.crowd(api, 4, max_tokens=200)
        streaming.until_streaming(4)
        waiting = here.crowd(api, 6, max_tokens=40, first=100)
        until(lambda: running(here)["prefill"] > 1, every_s=0.002)
        prefill.kill()
        killed = time.monotonic()
        here.until_gone()
        assert max(first_after(found, killed) for found in waiting.streams) < 15
        here.crowd(api, 4, max_tokens=20, first=200)
        assert len(here.check_crowds()) == 14
        assert here.ended == [prefill]
        assert decode in here.workers
        assert not any(map(restarted, streaming.streams)), "a stream that had left the prefill worker was restarted"
        assert any(map(restarted, waiting.streams)), "the kill hit nobody"
        here.check_nothing_left()


# --- references that lie

#: Puts another reference in the place of the KV of a job, if it is staged at that moment.
SPOIL = "return redis.call('HGET', KEYS[1], 'st') == 'staged' and redis.call('HSET', KEYS[1], 'kv', ARGV[1]) + 1"


def spoil(here: Site, reference: bytes) -> int:
    """Spoil every staged job; how many there were."""
    keys = here.redis.keys(here.keys.job("*"))
    return sum(bool(here.redis.eval(SPOIL, 1, key, reference)) for key in keys)


def check_handover_failed(here: Site, api: ApiProcess, attempts: int) -> None:
    """The client was told so, once and to its end; all is free, and the next one is served."""
    crowd = here.crowds.pop()
    (found,) = crowd.outcomes()
    assert not isinstance(found, BaseException), found
    assert found.done, "no [DONE]"
    assert found.error is not None
    assert found.error["code"] == "kv_handover_failed"
    crowd.check_prefixes()
    (job,) = jobs(here).values()
    assert (job["st"], job["fin"], job["ep"]) == ("done", "error", str(attempts))
    pids = here.pids()
    here.until_free()
    here.crowd(api, 1, max_tokens=20, first=500)
    here.check_crowds(20)
    assert here.pids() == pids
    crowd.close()
    here.check_nothing_left()


def test_a_reference_that_nobody_can_read_ends_the_stream_with_an_error(shared_server: Server) -> None:
    """Case 19, llm-d#2433: a corrupt segment handle makes the request hang. (Real ones: tests/e2e/test_cases.py.)"""
    with site(shared_server) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        decode = here.workers[1]
        api = here.api()
        decode.send(signal.SIGSTOP)
        crowd = here.crowd(api, 1)
        until(lambda: spoil(here, b"\xff no reference \x00"), every_s=0.005)
        decode.send(signal.SIGCONT)
        until(lambda: crowd.done, 10)
        check_handover_failed(here, api, attempts=1)


def test_a_hand_over_that_fails_every_time_ends_the_stream_with_an_error(shared_server: Server) -> None:
    """Case 19, and a fault that a new attempt may mend is tried again, but not for ever."""
    with site(shared_server) as here:
        here.serve(Role.PREFILL)
        here.start(Role.DECODE, "claim.before=pause:0.25@*", blocks=512)
        here.until_ready()
        api = here.api()
        crowd = here.crowd(api, 1)
        with again_and_again(0.01, lambda: spoil(here, b'{"null": "another job", "tokens": 1, "gen": 1}')):
            until(lambda: crowd.done, 40)
        check_handover_failed(here, api, attempts=8)


# --- frozen decode workers

READY_S, HEALTH_S = 5.0, 1.0


@pytest.mark.slow  # tests/integration/test_api_bounds.py freezes the only one
def test_with_all_decode_workers_frozen_readiness_fails_and_liveness_does_not(shared_server: Server) -> None:
    """Case 20, vllm#39863: the engine hangs, and the health check says that all is well, or hangs too.

    With the product's own times. Streams wait meanwhile, and go on.
    """
    with site(shared_server, null=replace(DIVERGENT, step_ms=20), times=QueueTimes()) as here:
        here.serve(Role.PREFILL, Role.DECODE, Role.DECODE)
        api = here.api()
        crowd = here.crowd(api, 6, max_tokens=120)
        crowd.until_streaming(6)
        decoders = here.workers[1:]
        for worker in decoders:
            worker.send(signal.SIGSTOP)
        frozen, failed_after = time.monotonic(), 0.0
        while time.monotonic() - frozen < READY_S + 1:
            for path in ("/health", "/health/ready", "/health/live"):
                asked = time.monotonic()
                status = get(api.url + path, timeout=10).status_code
                assert time.monotonic() - asked < HEALTH_S, path
                if path == "/health/live":
                    assert status == 200
                elif status == 503:
                    failed_after = failed_after or time.monotonic() - frozen
                else:
                    assert not failed_after, "ready again, with nobody there"
        assert 0 < failed_after < READY_S
        for worker in decoders:
            worker.send(signal.SIGCONT)
        until(lambda: is_ready(api.url), 10)
        here.check_crowds()
        assert here.ended == []
        here.check_nothing_left()
