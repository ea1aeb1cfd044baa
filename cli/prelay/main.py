"""The `prelay` command. Every command imports what it needs when it runs: `prelay --help` answers at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import __version__
from .batch.commands import batch_app
from .bench.commands import bench_app
from .errors import CliError
from .examples import examples
from .ops import commands as ops_commands
from .options import API, BATCH_WORKER, DECODE, PREFILL, SERVE, UNIFIED, takes

Given = dict[str, Any]

app = typer.Typer(
    name="prelay",
    help="Serve a language model from a queue: prefill and decode workers, Redis Streams, and preemption recovery"
    " that the client never sees.",
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode="rich",
)
model_app = typer.Typer(help="The model: fetch the demo model, or see where a model lies.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(batch_app, name="batch")
app.add_typer(bench_app, name="bench")
ops_commands.add_to(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"prelay {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog=examples(
        "prelay serve",
        "prelay serve --model ./my-model --port 8080 --decode 2",
        "prelay serve --config prelay.toml --log-level debug",
        "PRELAY_REDIS_URL=redis://:secret@queue:6379/0 prelay serve --host 0.0.0.0",
    )
)
@takes(*SERVE)
def serve(given: Given, config: str | None) -> int:
    """Serve a model: a private queue server, workers and the API, started, watched and stopped together."""
    from .serve import serve as body
    from .settings import load

    return body(load(given, config))


@app.command(epilog=examples("prelay api --redis-url unix:///run/prelay/redis.sock --model ./my-model --port 8000"))
@takes(*API)
def api(given: Given, config: str | None) -> int:
    """Run one API process against a queue that is there already."""
    from .roles import run_api
    from .settings import load

    return run_api(load(given, config))


def _worker(role: str, given: Given, config: str | None) -> int:
    from .roles import run_worker
    from .settings import load

    return run_worker(role, load(given, config))


@app.command(epilog=examples("prelay prefill --redis-url redis://queue:6379/0 --model ./my-model --threads 8"))
@takes(*PREFILL)
def prefill(given: Given, config: str | None) -> int:
    """Run one prefill worker: prompts into KV blocks."""
    return _worker("prefill", given, config)


@app.command(epilog=examples("prelay decode --redis-url redis://queue:6379/0 --model ./my-model --kv-blocks 4096"))
@takes(*DECODE)
def decode(given: Given, config: str | None) -> int:
    """Run one decode worker: KV blocks into tokens."""
    return _worker("decode", given, config)


@app.command(epilog=examples("prelay unified --redis-url redis://queue:6379/0 --model ./my-model"))
@takes(*UNIFIED)
def unified(given: Given, config: str | None) -> int:
    """Run one worker that does prefill and decode in one process."""
    return _worker("unified", given, config)


@app.command(
    epilog=examples("prelay batch-worker --redis-url redis://queue:6379/0 --model ./my-model --files-dir /srv/prelay")
)
@takes(*BATCH_WORKER)
def batch_worker(given: Given, config: str | None) -> int:
    """Run one batch worker: files of requests into the queue, one batch at a time."""
    from .roles import run_batch_worker
    from .settings import load

    return run_batch_worker(load(given, config))


@app.command(
    epilog=examples(
        "prelay doctor",
        "prelay doctor --model ./my-model --port 8080",
        "prelay doctor --redis-url redis://queue:6379/0 --json",
    )
)
@takes(
    *SERVE,
    fix="Remove KV segments in /dev/shm whose owners are dead. Nothing else is changed.",
    json="Print one JSON object, for machines.",
)
def doctor(given: Given, config: str | None, *, fix: bool, json: bool) -> int:
    """Check this machine, these settings and the server they name, and say what to do about what is wrong.

    The exit code is 0 when nothing failed; warnings do not count.
    """
    from .doctor import doctor as body
    from .settings import load

    return body(load(given, config), fix=fix, json=json)


@app.command(
    epilog=examples(
        "prelay chat",
        'prelay chat "Why is the sky blue?" --max-tokens 100',
        "prelay chat --url http://server:8000 --temperature 0.7 --seed 7",
    )
)
def chat(
    question: Annotated[str | None, typer.Argument(help="One question; without it a conversation begins.")] = None,
    url: Annotated[str, typer.Option(help="Where the API is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The model to ask for; the first one served if absent.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0, max=2)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of a server that wants one.", envvar="PRELAY_API_KEY", metavar="KEY")
    ] = None,
) -> None:
    """Talk to a running server. Ctrl-C stops an answer, /exit ends the conversation."""
    from .chat import Conversation, converse

    conversation = Conversation(url, model, system, max_tokens, temperature, seed, api_key=api_key)
    raise typer.Exit(converse(conversation, question))


@model_app.command("fetch-demo", epilog=examples("prelay model fetch-demo"))
def model_fetch_demo() -> None:
    """Fetch the demo model (SmolLM2-135M-Instruct, 93 MB) and convert it, once."""
    from .model import fetch_demo_model

    print(fetch_demo_model())


@model_app.command("path", epilog=examples("prelay model path", "prelay model path ./model.gguf"))
def model_path(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or hub id; the demo model if absent.", envvar="PRELAY_MODEL"),
    ] = None,
) -> None:
    """Print the folder that a model is served from, fetching or converting it if need be."""
    from .model import resolve_with_progress

    print(resolve_with_progress(model))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    try:
        return int(typer.main.get_command(app).main(list(arguments), prog_name="prelay", standalone_mode=False) or 0)
    except typer.Abort:
        return _fail("interrupted", 130)
    except CliError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except _USAGE_ERROR as error:
        words = error.format_message()  # empty where the help was shown instead
        return _fail(f"{words} (see prelay --help)", 2) if words else 2


#: typer's own UsageError: typer brings its own copy of click in newer versions, so it is found by kinship.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody is there to read it: the code says it too
        print(f"prelay: {message}", file=sys.stderr, flush=True)
    return code


def _hide_secrets(arguments: list[str]) -> None:
    """Move API keys, and a --redis-url with a password, from the arguments, which all can read, to the environment.

    The process replaces itself; the environment wins nothing by it, as the command line came first anyway.
    """
    from .redact import secrets_of

    rest, hidden = secrets_of(arguments)
    if hidden:
        os.execve(sys.executable, [sys.executable, "-P", "-m", "prelay", *rest], os.environ | hidden)  # noqa: S606 - no shell is the point


def run() -> None:
    """Run what the command line says, and exit."""
    _hide_secrets(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
