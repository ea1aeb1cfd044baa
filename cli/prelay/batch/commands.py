"""The command line of `prelay batch`. What a command needs it imports when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import BadUsage
from ..examples import examples

if TYPE_CHECKING:
    from .run import Target
    from .source import Source

batch_app = typer.Typer(
    help="Files of requests, run on what the fleet has to spare: answers to a million prompts, each exactly once.",
    no_args_is_help=True,
)

#: The window of a batch where none is given.
WINDOW = "24h"
_INPUT, _PROMPTS, _SERVER = "Input", "Prompts that become requests", "Server"


def _option(words: str, metavar: str = "", panel: str = "Options", *flags: str, **more: Any) -> Any:
    more.setdefault("show_default", False)
    return typer.Option(*flags, help=words, metavar=metavar or None, rich_help_panel=panel, **more)


def _switch(words: str, flag: str, panel: str = "Options") -> Any:
    return _option(words, "", panel, flag)


Url = Annotated[str | None, _option("Where the server is. \\[default: http://127.0.0.1:8000]", "URL", _SERVER, "--url")]
ApiKey = Annotated[str | None, _option("Key of a server that wants one.", "KEY", _SERVER, envvar="PRELAY_API_KEY")]
BatchId = Annotated[str, typer.Argument(help="The batch.", metavar="ID", show_default=False)]
Ordered = Annotated[bool, _switch("Answers in the order of the input, not that in which they ended.", "--ordered")]

Input = Annotated[
    str | None,
    typer.Argument(
        help="A file of requests, one JSON object a line, as OpenAI's batches take them; - is stdin. A name that ends"
        " in .csv is read as --csv.",
        metavar="INPUT",
        show_default=False,
    ),
]
Text = Annotated[bool, _switch("INPUT has a prompt on each line.", "--text", _INPUT)]
Csv = Annotated[bool, _switch("INPUT is CSV with a prompt in each row.", "--csv", _INPUT)]
PromptColumn = Annotated[str, _option("The column of the prompts. \\[default: prompt]", "NAME", _INPUT)]
Endpoint = Annotated[
    str | None,
    _option("/v1/completions or /v1/chat/completions. \\[default: the one that the first line names]", "PATH", _INPUT),
]
Model = Annotated[str | None, _option("The model to ask for. \\[default: the first one served]", "NAME", _PROMPTS)]
Chat = Annotated[bool, _switch("Each prompt is the user's message of a chat.", "--chat", _PROMPTS)]
System = Annotated[str | None, _option("A system message for all of them; makes them chats.", "TEXT", _PROMPTS)]
MaxTokens = Annotated[int | None, _option("Longest answer, in tokens (completions: 16).", "N", _PROMPTS, min=1)]
Temperature = Annotated[float | None, _option("0 is greedy.", "T", _PROMPTS, min=0, max=2)]
Window = Annotated[str, _option("What has not ended by then is expired: 30m, 24h, 7d. \\[default: 24h]", "TIME")]


class _WithServeArguments(TyperCommand):
    """What follows `--` is for prelay serve, and kept apart from our own arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta["serve"] = args[place + 1 :]
        return super().parse_args(ctx, args[:place])


@batch_app.command(
    cls=_WithServeArguments,
    epilog=examples(
        "prelay batch run in.jsonl -o out.jsonl",
        "prelay batch run prompts.txt --text --chat --max-tokens 200 -o out.jsonl",
        "prelay batch run table.csv --prompt-column question --system 'Answer briefly.' -o out.jsonl",
        "cat in.jsonl | prelay batch run - -o out.jsonl --ordered --url http://server:8000",
        "prelay batch run -o out.jsonl --resume",
        "prelay batch run in.jsonl -o out.jsonl --serve -- --model ./my-model --decode 2",
    ),
)
def run(
    context: typer.Context,
    input: Input = None,  # noqa: A002 - the name that the help shows
    output: Annotated[
        str,
        _option(
            "Where the answers go, whole or not at all. Lines that failed go beside it: out.errors.jsonl, for"
            " out.jsonl.",
            "FILE",
            "Options",
            "--output",
            "-o",
        ),
    ] = "",
    resume: Annotated[
        bool, _switch("Go on with what an earlier run began; INPUT may be left out.", "--resume")
    ] = False,
    fresh: Annotated[bool, _switch("Begin anew, whatever an earlier run left.", "--fresh")] = False,
    ordered: Ordered = False,
    window: Window = WINDOW,
    cancel_on_interrupt: Annotated[
        bool, _switch("Ctrl-C cancels the batch. Without, it goes on on the server.", "--cancel-on-interrupt")
    ] = False,
    text: Text = False,
    csv: Csv = False,
    prompt_column: PromptColumn = "prompt",
    endpoint: Endpoint = None,
    model: Model = None,
    chat: Chat = False,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    url: Url = None,
    api_key: ApiKey = None,
    serve: Annotated[
        bool,
        _option(
            "Start a server for this run and stop it after; what follows -- goes to prelay serve.",
            "",
            _SERVER,
            "--serve",
        ),
    ] = False,
) -> None:
    """Run a file of requests and write a file of answers. The same command again goes on where it was.

    Exit code 0: every line has its answer. 1: some have none. 2: bad usage.
    3: the batch failed, expired or was cancelled. 130: interrupted, it goes on.
    """
    from ..leaving import leaving_on_sigterm
    from ..report import Report
    from .course import Wish
    from .run import Plan, Target
    from .run import run as body

    arguments = context.meta["serve"]
    if arguments and not serve:
        raise BadUsage(f"{' '.join(arguments)} after -- is for prelay serve, which only --serve starts")
    if serve and url:
        raise BadUsage("--serve starts a server, and --url names one: give one of them")
    if resume and fresh:
        raise BadUsage("--resume goes on, and --fresh begins anew: give one of them")
    if input is None and not resume:
        raise BadUsage("no INPUT: name a file of requests, or - for stdin (--resume needs none)")
    _check_window(window)
    source = None
    if input is not None:
        source = _source(input, text, csv, prompt_column, endpoint, model, chat, system, max_tokens, temperature)
    wish = Wish(_output(output), resume, fresh)
    plan = Plan(wish, source, Target(url, api_key, serve, arguments), window, ordered, cancel_on_interrupt)
    with leaving_on_sigterm():
        raise typer.Exit(body(plan, Report()))


@batch_app.command(
    epilog=examples(
        "prelay batch submit in.jsonl",
        "prelay batch submit prompts.txt --text --chat --window 7d",
        "id=$(prelay batch submit in.jsonl) && prelay batch status $id --watch",
    )
)
def submit(
    input: Input = None,  # noqa: A002
    window: Window = WINDOW,
    text: Text = False,
    csv: Csv = False,
    prompt_column: PromptColumn = "prompt",
    endpoint: Endpoint = None,
    model: Model = None,
    chat: Chat = False,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Upload a file of requests, begin its batch and print the id."""
    from ..report import Report
    from .other import submit as body

    if input is None:
        raise BadUsage("no INPUT: name a file of requests, or - for stdin")
    _check_window(window)
    source = _source(input, text, csv, prompt_column, endpoint, model, chat, system, max_tokens, temperature)
    raise typer.Exit(body(source, _target(url, api_key), window, Report()))


@batch_app.command(
    epilog=examples(
        "prelay batch status",
        "prelay batch status batch_019ab3c5d7e2f00112233445",
        "prelay batch status batch_019ab3c5d7e2f00112233445 --watch",
        "prelay batch status --json",
    )
)
def status(
    id: Annotated[  # noqa: A002
        str | None, typer.Argument(help="A batch; without, the newest are listed.", metavar="ID", show_default=False)
    ] = None,
    watch: Annotated[bool, _switch("Stay until it is over.", "--watch")] = False,
    json: Annotated[bool, _switch("A JSON object a line, for machines.", "--json")] = False,
    limit: Annotated[int, _option("How many are listed. \\[default: 20]", "N", min=1, max=1000)] = 20,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show one batch, or the newest. The exit code of a batch that is over is that of prelay batch run."""
    from ..report import Report
    from .other import status as body

    if watch and id is None:
        raise BadUsage("--watch needs the ID of a batch: prelay batch status lists them")
    raise typer.Exit(body(id, _target(url, api_key), Report(), watched=watch, json=json, limit=limit))


@batch_app.command(epilog=examples("prelay batch cancel batch_019ab3c5d7e2f00112233445"))
def cancel(id: BatchId, url: Url = None, api_key: ApiKey = None) -> None:  # noqa: A002
    """Cancel a batch. Answers that it has stay; every other line is in its error file."""
    from ..report import Report
    from .other import cancel as body

    raise typer.Exit(body(id, _target(url, api_key), Report()))


@batch_app.command(
    epilog=examples(
        "prelay batch download batch_019ab3c5d7e2f00112233445 -o out.jsonl",
        "prelay batch download batch_019ab3c5d7e2f00112233445 -o - --ordered | jq .custom_id",
    )
)
def download(
    id: BatchId,  # noqa: A002
    output: Annotated[
        str,
        _option(
            "Where the answers go; errors go beside it. - is stdout, answers only.", "FILE", "Options", "--output", "-o"
        ),
    ] = "",
    ordered: Ordered = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Fetch the answers of a batch that is over. Exit codes are those of prelay batch run."""
    from ..leaving import leaving_on_sigterm
    from ..report import Report
    from .other import fetch

    if output != "-":
        _output(output)
    with leaving_on_sigterm():
        raise typer.Exit(fetch(id, output, _target(url, api_key), Report(), ordered=ordered))


def _output(output: str) -> Any:
    from pathlib import Path

    if not output:
        raise BadUsage("no output: give -o FILE")
    if output == "-":
        raise BadUsage("-o - : a run leaves a note beside its output, to go on by; give a file")
    return Path(output)


def _check_window(given: str) -> None:
    """As the server does, but before anything is uploaded."""
    if given == WINDOW:  # what follows takes a moment to import
        return
    from prelay_api.batch_order import window
    from prelay_text.errors import RequestError

    try:
        window("--window", given)
    except RequestError as error:
        raise BadUsage(str(error)) from None


def _target(url: str | None, api_key: str | None) -> Target:
    from .run import Target

    return Target(url, api_key)


def _source(
    path: str,
    text: bool,
    csv: bool,
    prompt_column: str,
    endpoint: str | None,
    model: str | None,
    chat: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> Source:
    """Put the options of an input together. Raise BadUsage for those that do not go together."""
    from .lines import ENDPOINTS, Shape
    from .source import Kind, Source

    if text and csv:
        raise BadUsage("--text and --csv are two kinds of input: give one of them")
    kind = Kind.TEXT if text else Kind.CSV if csv or path.lower().endswith(".csv") else Kind.JSONL
    shaped = {"--model": model, "--system": system, "--max-tokens": max_tokens, "--temperature": temperature}
    given = [flag for flag, value in shaped.items() if value is not None] + (["--chat"] if chat else [])
    if kind is Kind.JSONL and given:
        raise BadUsage(f"{given[0]} is for prompts (--text, --csv): the lines of {path} say it themselves")
    if kind is not Kind.JSONL and endpoint:
        raise BadUsage("--endpoint is for lines of JSON; prompts are completions, or chats with --chat")
    if endpoint and endpoint not in ENDPOINTS:
        raise BadUsage(f"--endpoint must be {' or '.join(ENDPOINTS)}, not {endpoint}")
    shape = Shape(model or "", chat or system is not None, system, max_tokens, temperature)
    return Source(path, kind, shape, prompt_column, endpoint)
