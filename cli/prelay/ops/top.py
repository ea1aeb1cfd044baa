"""`prelay top`: the fleet, live."""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.live import Live

from ..errors import CliError
from .frame import frame, unreachable
from .keys import single_keys
from .rates import Rates
from .screen import screen
from .server import AdminServer, Refused

#: Between the two looks that a rate needs, seconds: workers say how they stand each second.
LOOK_S = 1.1


def show_once(server: AdminServer) -> int:
    """Print one frame, with all that there is. Raise CliError when the server does not answer."""
    console, rates = screen(), Rates()
    rates.look(server.workers())
    time.sleep(LOOK_S)
    overview = server.overview()
    rates.look(overview["workers"])
    console.print(frame(overview, rates, server.url, console.width), soft_wrap=False)
    return 0


def show(server: AdminServer, every_s: float) -> int:
    """Show frames until q or Ctrl-C. A server that goes away is waited for; one that refuses us is not."""
    console, rates = screen(), Rates()
    rates.look(server.workers())  # an error is said before the screen is taken
    with single_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_next(server, rates, console), refresh=True)
                if keys.wait(every_s) in ("q", "Q", "\x1b"):
                    return 0
        except KeyboardInterrupt:
            return 0


def _next(server: AdminServer, rates: Rates, console: Console) -> RenderableType:
    try:
        overview = server.overview()
    except Refused as error:
        if error.status < 500:
            raise
        return unreachable(server.url, str(error))
    except CliError as error:
        return unreachable(server.url, str(error))
    rates.look(overview["workers"])
    return frame(overview, rates, server.url, console.width, console.height)
