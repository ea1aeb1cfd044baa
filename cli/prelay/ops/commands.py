"""The command line of those who operate a fleet. What a command needs it imports when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..examples import examples

jobs_app = typer.Typer(help="Requests that are under way: list, look at, cancel, preempt.", no_args_is_help=True)
dead_app = typer.Typer(
    help="Dead letters: jobs that were given up because each of their last attempts took a worker with it.",
    no_args_is_help=True,
)

_SERVER = "Server"


def _option(words: str, metavar: str = "", panel: str = "Options", *flags: str, **more: Any) -> Any:
    more.setdefault("show_default", False)
    return typer.Option(*flags, help=words, metavar=metavar or None, rich_help_panel=panel, **more)


def _argument(words: str, metavar: str) -> Any:
    return typer.Argument(help=words, metavar=metavar, show_default=False)


Url = Annotated[
    str,
    _option("Where an API process is. \\[default: http://127.0.0.1:8000]", "URL", _SERVER, "--url"),
]
ApiKey = Annotated[str | None, _option("Key of a server that wants one.", "KEY", _SERVER, envvar="PRELAY_API_KEY")]
Json = Annotated[bool, _option("Print JSON, for machines.", "", "Options", "--json")]
Request = Annotated[str, _argument("The request, as x-request-id names it.", "ID")]
Requests = Annotated[list[str], _argument("The requests, as x-request-id names them.", "ID…")]
Letters = Annotated[list[str] | None, _argument("The letters, as `prelay dead ls` names them.", "LETTER…")]
All = Annotated[bool, _option("All of them.", "", "Options", "--all")]

URL = "http://127.0.0.1:8000"


def add_to(app: typer.Typer) -> None:
    """Add these commands to the root."""
    app.command(
        epilog=examples("prelay top", "prelay top --url http://server:8000 --every 5", "prelay top --once | head")
    )(top)
    app.command(
        epilog=examples(
            "prelay drain host:4711:1f2e3d4c", "prelay drain 4711 --no-wait", "prelay drain --role decode --rolling"
        )
    )(drain)
    app.command(epilog=examples("prelay trace cmpl-0123456789abcdef01234567"))(trace)
    app.add_typer(jobs_app, name="jobs")
    app.add_typer(dead_app, name="dead")


def top(
    every: Annotated[float, _option("Between two frames.", "SECONDS", min=0.2, max=3600, show_default=True)] = 1.0,
    once: Annotated[bool, _option("Print one frame and end; so it is where stdout is no terminal.")] = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Show the fleet, live: workers and their memory, queues, tokens a second, attempts that were given up.

    q or Ctrl-C ends it.
    """
    import sys

    from .server import AdminServer
    from .top import show, show_once

    with AdminServer(url, api_key) as server:
        raise typer.Exit(show_once(server) if once or not sys.stdout.isatty() else show(server, every))


def drain(
    workers: Annotated[
        list[str] | None, _argument("The workers: their names, the beginnings of these, or pids.", "WORKER…")
    ] = None,
    role: Annotated[str, _option("All workers of this role: prefill, decode or unified.", "ROLE")] = "",
    rolling: Annotated[
        bool,
        _option("After each one, wait until another one serves in its place. prelay serve starts one by itself."),
    ] = False,
    wait: Annotated[bool, _option("Wait until each has ended.", "", "Options", "--wait/--no-wait")] = True,
    timeout: Annotated[float, _option("Longest wait for each.", "SECONDS", min=1, max=86_400, show_default=True)] = 120,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Have workers give back what they have, and end, one after the other. No request fails by it.

    What they ran goes on elsewhere, or waits until there is a worker again.
    """
    from .drain import drain as body
    from .drain import named
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        chosen = named(server.workers(), workers or (), role)
        raise typer.Exit(body(server, chosen, wait=wait, rolling=rolling, timeout_s=timeout))


def trace(request: Request, json: Json = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Show how a request came where it is: its states over all epochs, when, where and why.

    Until five minutes after its end; the last 64 states.
    """
    from .jobs import show_trace
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(show_trace(server, request, json=json))


@jobs_app.command(
    "ls",
    epilog=examples("prelay jobs ls", "prelay jobs ls --state decode --worker host:4711", "prelay jobs ls --json"),
)
def jobs_ls(
    state: Annotated[str, _option("queued, prefill, staged, adopting, decode or preempted.", "STATE")] = "",
    priority: Annotated[str, _option("interactive, normal or batch.", "CLASS", "Options", "--class")] = "",
    worker: Annotated[str, _option("Any part of the name of the worker that has it.", "WORKER")] = "",
    limit: Annotated[int, _option("So many, the oldest.", "N", min=1, max=1000, show_default=True)] = 50,
    json: Json = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """List the jobs that are not over, the oldest first: one for each choice of a request."""
    from .jobs import show_list
    from .server import AdminServer

    words = {"state": state, "priority": priority, "worker": worker}
    wanted: dict[str, str | int] = {name: value for name, value in words.items() if value}
    with AdminServer(url, api_key) as server:
        raise typer.Exit(show_list(server, {**wanted, "limit": limit}, json=json))


@jobs_app.command("show", epilog=examples("prelay jobs show cmpl-0123456789abcdef01234567"))
def jobs_show(request: Request, json: Json = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Show all that is known of a request, until five minutes after its end. Never its text."""
    from .jobs import show_job
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(show_job(server, request, json=json))


@jobs_app.command("cancel", epilog=examples("prelay jobs cancel cmpl-0123456789abcdef01234567"))
def jobs_cancel(requests: Requests, url: Url = URL, api_key: ApiKey = None) -> None:
    """End requests, whoever waits for their answers."""
    from .jobs import cancel
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(cancel(server, requests))


@jobs_app.command("preempt", epilog=examples("prelay jobs preempt cmpl-0123456789abcdef01234567"))
def jobs_preempt(requests: Requests, url: Url = URL, api_key: ApiKey = None) -> None:
    """Have the workers give requests up now. They begin again, and their clients see nothing of it."""
    from .jobs import preempt
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(preempt(server, requests))


@dead_app.command("ls", epilog=examples("prelay dead ls"))
def dead_ls(
    limit: Annotated[int, _option("So many, the newest.", "N", min=1, max=1000, show_default=True)] = 50,
    json: Json = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """List the dead letters, the newest first."""
    from .dead import show_letters
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(show_letters(server, limit, json=json))


@dead_app.command("retry", epilog=examples("prelay dead retry 1700000000000-0", "prelay dead retry --all"))
def dead_retry(letters: Letters = None, everything: All = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Submit the jobs anew, each as a request of its own, and drop the letters.

    The answer of each is kept for five minutes. A job that crashes its workers again ends here again.
    """
    from .dead import chosen, retry
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(retry(server, chosen(server, letters or (), everything=everything)))


@dead_app.command("drop", epilog=examples("prelay dead drop 1700000000000-0", "prelay dead drop --all"))
def dead_drop(letters: Letters = None, everything: All = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Forget dead letters."""
    from .dead import chosen, drop
    from .server import AdminServer

    with AdminServer(url, api_key) as server:
        raise typer.Exit(drop(server, chosen(server, letters or (), everything=everything)))
