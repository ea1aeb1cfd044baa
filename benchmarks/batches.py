"""What a batch costs, with null workers: lines per second, and what the runner and Redis hold while it runs.

    python -m benchmarks.batches --lines 100000 --tokens 8

One batch of short prompts is run by one batch worker over null workers of one process each. Printed as JSON, once a
second while it runs and once at the end:

lines_per_s      from the moment when the batch is created to its end, and the best second in between
cpu_us           CPU time for each line, microseconds: of the runner (the work horse), Redis and the workers
runner_rss_mib   memory of the work horse: after the first second, and at the most
redis_mib        memory of Redis: before, at the most, and after the end
waiting, jobs    the most jobs that waited for a prefill at a time, and that Redis knew of, over or not

Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from prelay_worker.config import NullModel, Role
from tests.bed.batch import COMPLETIONS, Batches
from tests.bed.processes import Fleet, Process, fleet
from tests.bed.servers import Server, make_server
from tests.bed.tokenizer import make_tokenizer, words


def rows(count: int, tokens: int) -> Iterator[bytes]:
    """Lines with texts of four words, in no order."""
    for n in range(count):
        scattered = n * 7919 % count
        text = words((scattered % 1000, scattered // 1000 % 1000, 3, 5))
        body = {"model": "null", "prompt": text, "max_tokens": tokens}
        yield (
            json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": COMPLETIONS, "body": body}).encode() + b"\n"
        )


def upload(batches: Batches, count: int, tokens: int) -> str:
    with batches.store.create("batch", "in.jsonl") as writing:
        for row in rows(count, tokens):
            writing.write(row)
        return writing.commit().id


class Watch:
    """Looks at the runner and at Redis while the batch runs."""

    def __init__(self, server: Server, batches: Batches, worker: Process) -> None:
        self._server, self._batches, self._worker = server, batches, psutil.Process(worker.pid)
        self.began = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self._at, self._done = self.began, 0

    def look(self, batch: str) -> bool:
        """Take a sample; False once the batch is over."""
        state, now = self._batches.look(batch), time.monotonic()
        done = state.progress.completed + state.progress.failed
        sample: dict[str, Any] = {
            "s": round(now - self.began, 1),
            "done": done,
            "lines_per_s": round((done - self._done) / (now - self._at)),
            **self._of_horse(),
            **self._of_redis(),
        }
        self._at, self._done = now, done
        self.samples.append(sample)
        print(json.dumps(sample), flush=True)
        return not state.status.over

    def _of_horse(self) -> dict[str, Any]:
        for horse in self._worker.children():
            try:
                times = horse.cpu_times()
                return {
                    "runner_rss_mib": round(horse.memory_info().rss / 2**20, 1),
                    "runner_cpu_s": round(times.user + times.system, 2),
                }
            except psutil.NoSuchProcess:
                continue
        return {}

    def _of_redis(self) -> dict[str, Any]:
        keys, client = self._batches.queue.keys, self._server.client
        waiting = client.hget(keys.waiting, "#jobs:batch")
        memory: dict[str, Any] = client.info("memory")
        space: dict[str, Any] = client.info("keyspace").get("db0", {})
        used = round(memory["used_memory"] / 2**20, 1)
        return {"redis_mib": used, "waiting": int(waiting or 0), "keys": space.get("keys", 0)}


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(server: Server, found: Fleet, batches: Batches, args: argparse.Namespace) -> dict[str, Any]:
    null = NullModel(step_ms=args.step_ms)
    roles = [Role.UNIFIED] * args.workers if args.unified else [Role.PREFILL, Role.DECODE] * (args.workers // 2)
    for role in roles:
        found.worker(role, null=null, blocks=65_536, max_running=args.running)
    workers = [psutil.Process(process.pid) for process in found.processes]
    worker = found.batch_worker(batches.files_dir, window=args.window)
    print(json.dumps({"roles": roles, "lines": args.lines, "pid": worker.pid}), flush=True)
    watch = Watch(server, batches, worker)
    before = watch._of_redis()["redis_mib"]
    file = upload(batches, args.lines, args.tokens)
    redis = psutil.Process(server.pid)
    spent = cpu_s([redis]), cpu_s(workers)
    batch = batches.create_from(file)
    watch.began = watch._at = time.monotonic()
    while watch.look(batch):
        time.sleep(1)
    took = time.monotonic() - watch.began
    samples = watch.samples
    used = {
        "runner": max(each.get("runner_cpu_s", 0.0) for each in samples),
        "redis": cpu_s([redis]) - spent[0],
        "workers": cpu_s(workers) - spent[1],
    }
    rss = [each["runner_rss_mib"] for each in samples if "runner_rss_mib" in each]
    state = batches.look(batch)
    return {
        "status": state.status,
        "completed": state.progress.completed,
        "lines_per_s": round(args.lines / took),
        "best_second": max(each["lines_per_s"] for each in samples),
        "cpu_us": {name: round(1e6 * seconds / args.lines) for name, seconds in used.items()},
        "runner_rss_mib": [*rss[1:2], max(rss, default=0)],
        "redis_mib": [before, max(each["redis_mib"] for each in samples), samples[-1]["redis_mib"]],
        "waiting": max(each["waiting"] for each in samples),
        "keys": max(each["keys"] for each in samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tokenizer(Path(folder) / "model")
        server = make_server("redis", Path(folder), "--appendfsync", "everysec")  # as `prelay serve` has it
        try:
            server.start()
            with fleet(server.settings(), model) as found:
                batches = Batches(found.queue, Path(folder) / "files")
                print(json.dumps(measure(server, found, batches, args)), flush=True)
                batches.close()
        finally:
            server.close()


if __name__ == "__main__":
    main()
