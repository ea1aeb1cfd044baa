"""Every metric, once: docs/metrics.md shows this table, and nothing is recorded that does not stand in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .job import Priority


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Part(StrEnum):
    """Who makes a metric. `SCRAPE` ones are read from Redis and from the heartbeats while /metrics answers."""

    API = "api"
    WORKER = "worker"
    EVERY = "every"  # process that has a queue client
    SUPERVISOR = "supervisor"
    SCRAPE = "scrape"


#: A label value that is none of those that are known.
OTHER = "other"
#: The label `class` of a request that was refused before its class was known.
NO_CLASS = "none"

#: Upper bounds of histograms, seconds.
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
REDIS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0)

CLASSES = tuple(Priority)
CAUSES = ("kv", "urgent", "admin", "drain", "lost", "handover")
OUTCOMES = ("stop", "length", "error", "deadline", "cancelled", "left", "invalid", "busy", "unavailable")
SWEPT = ("reaped", "requeued", "pushed", "dead", "abandoned", "expired")
WRITES = ("tokens", "handoff", "adopt", "giveup", "recall", "fail", "expire")
WASTE = ("discarded", "recomputed")
ROLES = ("api", "prefill", "decode", "unified", "batch", "server", "nursery")
ERRORS = ("unavailable", "full", "refused")

Labels = Mapping[str, tuple[str, ...]]

_NONE: Labels = {}
_CLASS: Labels = {"class": CLASSES}
_WORKER: Labels = {"worker": (), "role": ()}
_STAGE: Labels = {"class": CLASSES, "stage": ("prefill", "decode")}


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels`: the values that each may have, none where they cannot be listed. `vllm`: what vLLM calls the like."""

    name: str
    kind: Kind
    part: Part
    labels: Labels
    help: str
    buckets: tuple[float, ...] = ()
    vllm: str = ""


def _counter(name: str, part: Part, labels: Labels, words: str, vllm: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, part, labels, words, vllm=vllm)


def _gauge(name: str, labels: Labels, words: str, vllm: str = "", part: Part = Part.SCRAPE) -> Metric:
    return Metric(name, Kind.GAUGE, part, labels, words, vllm=vllm)


def _time(name: str, part: Part, words: str, vllm: str = "", buckets: tuple[float, ...] = REQUEST_S) -> Metric:
    return Metric(name, Kind.HISTOGRAM, part, _CLASS, words, buckets, vllm)


#: What clients get: the API processes see it.
_CLIENTS = (
    _time(
        "prelay_time_to_first_token_seconds",
        Part.API,
        "From a request's arrival to its first token, queueing included; of each choice",
        "vllm:time_to_first_token_seconds",
    ),
    _time(
        "prelay_time_per_output_token_seconds",
        Part.API,
        "(last token - first token) / (tokens - 1), of each choice that ended well",
        "vllm:request_time_per_output_token_seconds",
        TOKEN_S,
    ),
    _time(
        "prelay_inter_token_latency_seconds",
        Part.API,
        "Between two arrivals of tokens of a choice, over preempts too",
        "vllm:inter_token_latency_seconds",
        TOKEN_S,
    ),
    _time(
        "prelay_e2e_request_latency_seconds",
        Part.API,
        "From a request's arrival to the end of its answer, if it ended well",
        "vllm:e2e_request_latency_seconds",
    ),
    _counter(
        "prelay_requests_total",
        Part.API,
        {"class": (*CLASSES, NO_CLASS), "outcome": OUTCOMES},
        "Requests by how they ended",
        "vllm:request_success_total",
    ),
    _gauge("prelay_open_requests", _NONE, "Requests that are being answered", part=Part.API),
    _counter("prelay_requeues_total", Part.API, _CLASS, "Preempts that the API answered: the job begins again"),
    _counter("prelay_resubmits_total", Part.API, _CLASS, "Jobs that Redis had lost and the API submitted again"),
)

#: Where the time goes: the five stages, as the workers see them.
_STAGES = (
    _time(
        "prelay_request_queue_time_seconds",
        Part.WORKER,
        "Stage 1: in the queue, until a worker begins the prefill; of each attempt",
        "vllm:request_queue_time_seconds",
    ),
    _time(
        "prelay_request_prefill_time_seconds",
        Part.WORKER,
        "Stage 2: prefill, until the first token is sampled",
        "vllm:request_prefill_time_seconds",
    ),
    _time(
        "prelay_request_handover_time_seconds",
        Part.WORKER,
        "Stage 3: hand-over, the KV is copied into a decode worker",
    ),
    _time(
        "prelay_request_decode_queue_time_seconds",
        Part.WORKER,
        "Stage 4: prefilled, until a decode worker begins to copy",
    ),
    _time(
        "prelay_request_decode_time_seconds",
        Part.WORKER,
        "Stage 5: decode, until the last token is sampled; of the attempt that ends the job",
        "vllm:request_decode_time_seconds",
    ),
)

_TOKENS = (
    _counter(
        "prelay_prompt_tokens_total",
        Part.WORKER,
        _CLASS,
        "Tokens of prompts that were prefilled; each job once",
        "vllm:prompt_tokens_total",
    ),
    _counter(
        "prelay_generation_tokens_total",
        Part.WORKER,
        _CLASS,
        "Tokens that were sampled, those discarded later too",
        "vllm:generation_tokens_total",
    ),
    _counter("prelay_computed_tokens_total", Part.WORKER, _NONE, "Positions that went through the model"),
    _counter(
        "prelay_prefix_cache_queries_total",
        Part.WORKER,
        _NONE,
        "Tokens that came to be prefilled where there is a prefix cache",
        "vllm:prefix_cache_queries_total",
    ),
    _counter(
        "prelay_prefix_cache_hits_total",
        Part.WORKER,
        _NONE,
        "Tokens of those that the prefix cache had: they were not computed",
        "vllm:prefix_cache_hits_total",
    ),
    _counter(
        "prelay_wasted_tokens_total",
        Part.EVERY,
        {"reason": WASTE},
        "Work lost to preempts and crashes: tokens sampled and discarded, or prefilled again",
    ),
)

#: What goes wrong and is put right.
_FAULTS = (
    _counter(
        "prelay_preemptions_total",
        Part.WORKER,
        {"cause": CAUSES},
        "Attempts that a worker gave up",
        "vllm:num_preemptions_total",
    ),
    _counter(
        "prelay_fenced_writes_total",
        Part.WORKER,
        {"write": WRITES},
        "Writes that were refused because the job is another worker's by now",
    ),
    _counter(
        "prelay_redeliveries_total",
        Part.WORKER,
        _NONE,
        "Stream entries taken over from workers that never claimed them",
    ),
    _counter("prelay_swept_jobs_total", Part.EVERY, {"found": SWEPT}, "Jobs that a sweep put right, or ended"),
    _counter(
        "prelay_restarts_total",
        Part.SUPERVISOR,
        {"role": ROLES},
        "Processes that ended by themselves and that prelay serve started again",
    ),
    Metric(
        "prelay_redis_command_seconds",
        Kind.HISTOGRAM,
        Part.EVERY,
        {"script": ()},
        "Round trips to Redis by script, repeats included; pipeline: several in one",
        REDIS_S,
    ),
    _counter("prelay_redis_errors_total", Part.EVERY, {"kind": ERRORS}, "Calls to Redis that failed"),
)

#: What stands in Redis and in the heartbeats now.
_NOW = (
    _gauge("prelay_build_info", {"version": (), "fleet": ()}, "Always 1"),
    _gauge("prelay_redis_up", _NONE, "Whether Redis answered; if not, the gauges below are absent"),
    _gauge("prelay_redis_memory_used_bytes", _NONE, "Memory that Redis uses"),
    _gauge("prelay_redis_memory_limit_bytes", _NONE, "maxmemory of Redis; 0: none"),
    _gauge("prelay_queue_depth", _STAGE, "Jobs that wait for a prefill; prefilled ones for a decode worker"),
    _gauge("prelay_queue_oldest_age_seconds", _STAGE, "Age of the longest waiting of those; 0: none waits"),
    _gauge("prelay_queue_tokens", _CLASS, "Prompt tokens of the jobs that wait for a prefill"),
    _gauge("prelay_jobs", {"state": ("queued", "held", "preempted")}, "Jobs that are not over"),
    _gauge("prelay_dead_letters", _NONE, "Jobs that were given up, as far back as they are kept (1000)"),
    _gauge(
        "prelay_workers",
        {"role": ("prefill", "decode", "unified"), "state": ("ready", "draining", "stale")},
        "Workers that have a heartbeat; stale: it, or the model loop, stands still for 4 s",
    ),
    _gauge("prelay_num_requests_running", _WORKER, "Sequences that run", "vllm:num_requests_running"),
    _gauge(
        "prelay_num_requests_waiting", _WORKER, "Jobs that were claimed and wait for room", "vllm:num_requests_waiting"
    ),
    _gauge(
        "prelay_kv_blocks",
        {**_WORKER, "state": ("free", "copying", "leased", "cached", "orphaned")},
        "KV blocks; orphaned ones belong to nobody, and there must be none",
    ),
    _gauge("prelay_kv_blocks_limit", _WORKER, "All KV blocks: free, copying, leased and cached"),
    _gauge(
        "prelay_kv_cache_usage_ratio",
        _WORKER,
        "Share of the KV blocks that is taken, 0 to 1",
        "vllm:kv_cache_usage_perc",
    ),
    _gauge("prelay_batches_open", _NONE, "Batches that are not over"),
    _gauge(
        "prelay_batches",
        {"state": ("running", "waiting")},
        "Batches that are not over (the 100 oldest), by whether a batch worker holds them",
    ),
    _gauge(
        "prelay_batch_lines",
        {"state": ("total", "completed", "failed", "outstanding")},
        "Lines of those, as far as they are counted; outstanding: neither completed nor failed",
    ),
)

TABLE: dict[str, Metric] = {metric.name: metric for metric in (*_CLIENTS, *_STAGES, *_TOKENS, *_FAULTS, *_NOW)}
