"""The options of all commands, once: what `--help` says. What a value may be is decided in settings.py.

Kept free of pydantic, so that `--help` and shell completion answer at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .classes import QUEUED_JOBS, QUEUED_TOKENS, written


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `name` is the settings field; the flag, variable and file key follow from it."""

    name: str
    metavar: str
    help: str
    default: str = ""
    panel: str = "Options"
    is_switch: bool = False
    hidden: bool = False
    is_list: bool = False  # may be given several times

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PRELAY_" + self.name.upper()

    def parameter(self) -> inspect.Parameter:
        """Return this option as a parameter that typer reads. Values stay text: settings.py judges them."""
        words = self.help + (f" [default: {self.default}]" if self.default else "")
        info = typer.Option(
            self.flag,
            metavar=None if self.is_switch else self.metavar,
            help=words.replace("[", r"\["),
            rich_help_panel=self.panel,
            show_default=False,
            hidden=self.hidden,
        )
        kind: Any = bool | None if self.is_switch else list[str] | None if self.is_list else str | None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
        )


#: A command: (values given on the command line, the file named, switches of its own) to an exit code.
Body = Callable[..., int]

_QUEUE, _WORKERS, _GPU, _MODEL, _API, _BATCHES = "Queue", "Workers", "GPUs", "Model", "API", "Batches"

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "redis_url", "URL", "Redis or Valkey: redis://, rediss:// or unix://. Keep a password out of the"
            " command line: use PRELAY_REDIS_URL or the file.", "prelay serve starts a private one",
            _QUEUE,
        ),
        Option(
            "redis_password_file", "FILE", "A file whose only line is the password of that server, in place of one in"
            " the URL.", "", _QUEUE,
        ),
        Option(
            "state_dir", "DIR", "Where the private server keeps its data, log and socket.",
            "$XDG_STATE_HOME/prelay or ~/.local/state/prelay", _QUEUE,
        ),
        Option("model", "MODEL", "A Hugging Face folder, a .gguf file, or a hub id.", "the demo model", _MODEL),
        Option(
            "served_model_name", "NAME", "The name that clients ask for.", "the name of the model's folder", _MODEL,
        ),
        Option("device", "DEVICE", "What workers compute on: cpu, or cuda (docs/gpu.md).", "cpu", _WORKERS),
        Option("dtype", "TYPE", "auto, float32 or bfloat16.", "auto: bfloat16 where the CPU has it", _MODEL),
        Option(
            "kernels", "KIND", "auto, native or torch. native: C++ that is compiled for this CPU at the first start.",
            "auto: native where there is a C++ compiler", _WORKERS,
        ),
        Option(
            "quantization", "KIND", "none, or w8a8: weights are rounded to eight bits at the start, and what they"
            " multiply as it comes: faster, in less memory, not quite the same answers. Needs native kernels.",
            "none", _WORKERS,
        ),
        Option("max_model_len", "TOKENS", "Longest prompt plus answer.", "the model's context", _MODEL),
        Option("prefill", "N", "Number of prefill workers.", "1, or 0 with --unified", _WORKERS),
        Option("decode", "N", "Number of decode workers.", "1, or 0 with --unified", _WORKERS),
        Option("unified", "N", "Number of workers that do both in one process.", "0", _WORKERS),
        Option(
            "kv_blocks", "N", "KV blocks of each decode or unified worker.",
            "a quarter of the memory shared among them, at most --max-running full contexts, at least one; on a GPU"
            " what --gpu-memory-utilization leaves", _WORKERS,
        ),
        Option(
            "prefill_kv_blocks", "N", "KV blocks of each prefill worker, in /dev/shm.",
            "two full contexts, less where /dev/shm or memory is short, at least one; on a GPU what"
            " --gpu-memory-utilization leaves", _WORKERS,
        ),
        Option("gpu", "N", "The GPU of this worker, as the driver counts those that it sees.", "0", _GPU),
        Option(
            "prefill_gpus", "LIST", "The GPUs of prefill workers, such as 0,1: the first worker has the first, and so"
            " on, from the front again when there are more workers.", "0", _GPU,
        ),
        Option("decode_gpus", "LIST", "Those of decode and unified workers.", "0", _GPU),
        Option(
            "gpu_memory_utilization", "SHARE", "Of a GPU's memory, what the workers take that this command starts on"
            " it, all together and for everything: weights, steps, KV blocks.", "0.9", _GPU,
        ),
        Option(
            "exact", "on|off", "On GPUs: answers that are the same bit for bit whatever runs beside them and however"
            " often they are preempted. Slower. On CPUs it is always so.", "off", _GPU,
        ),
        Option(
            "cuda_graphs", "on|off", "Capture decode steps as CUDA graphs at the start, and replay them.", "on", _GPU,
        ),
        Option(
            "kv_transport", "KIND", "How KV leaves a prefill worker on a GPU: cuda_ipc, or pinned (through /dev/shm,"
            " which must be as large as its pool).", "auto: cuda_ipc where processes can map each other's memory", _GPU,
        ),
        Option("block_size", "TOKENS", "Tokens in a KV block.", "16", _WORKERS),
        Option("max_running", "N", "Sequences that one worker runs at a time.", "64, on GPUs 256", _WORKERS),
        Option("prefill_chunk", "TOKENS", "Prompt tokens computed in one step.", "256, on GPUs 2048", _WORKERS),
        Option(
            "batch_step_ms", "MS", "Prompts of batches are computed in steps that take about so long.", "400", _WORKERS,
        ),
        Option(
            "prefix_cache", "on|off", "Keep the KV of prompts and answers for prompts that begin alike, as long as its"
            " memory is not needed: in prefill and unified workers.", "on", _WORKERS,
        ),
        Option("max_preemptions", "N", "After so many preempts a job is not preempted again.", "3", _WORKERS),
        Option(
            "local_prefill_tokens", "N", "A decode worker with room takes prompts of up to so many tokens itself while"
            " the prefill workers are busy. 0: none.", "0", _WORKERS,
        ),
        Option(
            "patience_s", "SECONDS", "A job that waits for room in a worker is passed by more urgent ones; each time it"
            " has waited so long, it counts one class higher.", "30", _WORKERS,
        ),
        Option(
            "threads", "N", "Threads of each worker.",
            "all cores; with torch's kernels an equal share among this command's workers",
            _WORKERS,
        ),
        Option(
            "decode_nice", "N", "How far decode workers stand back for others on the machine, 0 to 19 as of nice(1):"
            " the more, the sooner first tokens come, and the less evenly the others.",
            "10 beside prefill workers of the same prelay serve, else 0", _WORKERS,
        ),
        Option("api", "N", "Number of API processes on the one port.", "1", _API),
        Option("host", "ADDRESS", "Address to listen on.", "127.0.0.1", _API),
        Option("port", "PORT", "Port to listen on.", "8000", _API),
        Option(
            "api_key", "KEY", "Whoever asks must send this key, or another one that is given: everything but the health"
            " routes wants Authorization: Bearer KEY. May be repeated; PRELAY_API_KEY and the file take several with"
            " commas between. Keep keys out of the command line: use PRELAY_API_KEY or --api-key-file.",
            "everybody may ask", _API, is_list=True,
        ),
        Option("api_key_file", "FILE", "API keys, one a line; lines that begin with # do not count.", "", _API),
        Option(
            "body_timeout_s", "SECONDS", "Longest time for a request, headers and body, to arrive; then 408.", "60",
            _API,
        ),
        Option(
            "max_queued_jobs", "N", "How many answers may wait to be begun; beyond that, new requests get a 429. One"
            " number for each class, or class=N,class=N; 0: no limit.", written(QUEUED_JOBS), _API,
        ),
        Option(
            "max_queued_tokens", "N", "The same for the tokens of the prompts that wait.", written(QUEUED_TOKENS), _API,
        ),
        Option(
            "keep", "WHAT", "What a preempt keeps of an answer: delivered (what the client has seen) or emitted"
            " (all of it).", "delivered", _API,
        ),
        Option(
            "shutdown_grace_s", "SECONDS", "Longest time that the API takes, when it stops, to end open streams with an"
            " error that says try again.", "10", _API,
        ),
        Option(
            "drain_s", "SECONDS", "How long the API, when it is told to stop, lets open requests go on before it tells"
            " them to try again; a second signal tells them at once.", "5", _API,
        ),
        Option(
            "share_port", "", "Let other API processes of this user listen on the same port: the system deals"
            " connections out among them.", panel=_API, is_switch=True,
        ),
        Option(
            "files_dir", "DIR", "Where uploaded files, and the state and results of batches, lie: one folder that all"
            " API processes and batch workers share. Each model has its own in it.",
            "files in --state-dir; for single processes none: no batches", _BATCHES,
        ),
        Option("batch", "N", "Number of batch workers: so many batches run at a time. 0: no batches.", "2", _BATCHES),
        Option(
            "batch_redis_url", "URL", "Where RQ keeps which batch is run by whom: a plain Redis or Valkey, no cluster.",
            "--redis-url", _BATCHES,
        ),
        Option("log_level", "LEVEL", "debug, info, warning or error.", "info"),
        Option("log_format", "FORM", "text, or json: one object a line, with request, epoch and worker.", "text"),
        Option(
            "metrics_port", "PORT", "Show the worker's metrics at http://ADDRESS:PORT/metrics, and whether it is ready"
            " at /health/ready. 0: no.", "0", _WORKERS,
        ),
        Option("metrics_host", "ADDRESS", "Address to show them on.", "127.0.0.1", _WORKERS),
        Option("null_model", "", "A fake model: hashes for tokens.", panel="Tests", is_switch=True, hidden=True),
        Option("null_divergent", "", "The epoch goes into the hash.", panel="Tests", is_switch=True, hidden=True),
        Option("null_step_ms", "MS", "Time of a decode step.", panel="Tests", hidden=True),
        Option("null_vocab", "N", "Number of different tokens.", panel="Tests", hidden=True),
        Option("null_prefill_ms", "MS", "Time of a prompt token.", panel="Tests", hidden=True),
    )
}  # fmt: skip

_NULL = ("null_model", "null_divergent", "null_step_ms", "null_prefill_ms", "null_vocab")
_RUN = (
    "device", "gpu", "gpu_memory_utilization", "exact", "cuda_graphs", "dtype", "kernels", "quantization",
    "max_model_len", "block_size", "max_running", "prefill_chunk", "batch_step_ms", "prefix_cache", "max_preemptions",
    "patience_s", "threads", "metrics_port", "metrics_host", *_NULL,
)  # fmt: skip
_COMMON = ("redis_url", "redis_password_file", "model", "log_level", "log_format")
API = (
    *_COMMON, "served_model_name", "host", "port", "api_key", "api_key_file", "body_timeout_s", "max_queued_jobs",
    "max_queued_tokens", "keep", "shutdown_grace_s", "drain_s",
    "share_port", "files_dir", "batch_redis_url",
)  # fmt: skip
PREFILL = (*_COMMON, "prefill_kv_blocks", "kv_transport", *_RUN)
DECODE = (*_COMMON, "kv_blocks", "local_prefill_tokens", "decode_nice", *_RUN)
BATCH_WORKER = (
    *_COMMON, "served_model_name", "files_dir", "batch_redis_url", "max_queued_jobs", "max_queued_tokens",
    "metrics_port", "metrics_host",
)  # fmt: skip
UNIFIED = (*_COMMON, "kv_blocks", *_RUN)
#: Of a single worker only: prelay serve shows the metrics of all its processes at the API, and gives out GPUs.
_ALONE = ("metrics_port", "metrics_host", "gpu")
SERVE = tuple(name for name in OPTIONS if name not in _ALONE)

_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", show_default=False,
            help="A TOML file with settings (kv_blocks = 512). Also PRELAY_CONFIG; no file is read unasked.",
        ),
    ],
)  # fmt: skip


def _switch(name: str, words: str) -> inspect.Parameter:
    info = typer.Option("--" + name.replace("_", "-"), help=words, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])


def takes(*names: str, **switches: str) -> Callable[[Body], Callable[..., None]]:
    """Give a command the options `names`, --config, and switches that are no settings: their help by name.

    The command is called with a dict of the values that were given (absent ones are left out), the file, and its
    switches by name; it returns an exit code.
    """

    def decorate(body: Body) -> Callable[..., None]:
        parameters = [_switch(name, words) for name, words in switches.items()]
        parameters += [*(OPTIONS[name].parameter() for name in names), _CONFIG]

        def command(**values: Any) -> None:
            config = values.pop("config")
            given = {name: values.pop(name) for name in names}
            given = {name: value for name, value in given.items() if value is not None}
            raise typer.Exit(body(given, config, **values))

        command.__doc__ = body.__doc__
        command.__name__ = body.__name__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
