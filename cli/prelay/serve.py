"""`prelay serve`: everything that can be wrong is looked at first, then the fleet is started."""

from __future__ import annotations

import asyncio
import contextlib

from .apikeys import api_keys
from .device import check_device
from .embedded import EmbeddedServer
from .fleet import Fleet, Plan
from .fleetmetrics import empty_folder
from .host import check_port, this_host
from .leaving import leaving_on_sigterm
from .model import resolve_model, served_name
from .queueserver import inspect_server
from .report import Report
from .roles import geometry
from .segments import sweep_segments
from .settings import Settings, unknown_variables
from .sizing import sizes
from .statedir import StateDir


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit code: 0 stopped in order, 130 stopped in a hurry.

    Raise CliError with one line for whatever does not work.
    """
    report = Report(json=settings.log_format == "json")
    for variable in unknown_variables():
        report.warn(f"{variable} is set, and no setting has that name")
    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_on_sigterm())
        # First what is quick to say and would otherwise be found out after a long download.
        api_keys(settings)
        check_device(settings)
        if settings.url is not None:
            inspect_server(settings.url)  # before anything runs that would have to be stopped again
        if settings.batch and settings.batch_redis_url is not None:
            inspect_server(settings.batch_redis_url.get_secret_value(), "--batch-redis-url")
        server = _embedded(settings, stack)
        check_port(settings.host, settings.port)
        plan = _plan(settings, server, report)
        return asyncio.run(Fleet(plan, report).run())


def _embedded(settings: Settings, stack: contextlib.ExitStack) -> EmbeddedServer | None:
    if settings.url is not None:
        return None
    state = StateDir(settings.state_dir)
    stack.callback(state.close)
    server = EmbeddedServer(state, this_host().memory)
    stack.callback(server.close)
    return server


def _plan(settings: Settings, server: EmbeddedServer | None, report: Report) -> Plan:
    with report.progress() as tell:
        folder = resolve_model(settings.model, tell)
    name = settings.served_model_name or served_name(settings.model, folder)
    kv = geometry(settings, folder)
    if swept := sweep_segments():  # before /dev/shm is measured
        report.step(f"removed {len(swept)} KV segment(s) that a crash had left in /dev/shm")
    metrics = empty_folder(settings, report.warn)
    return Plan(settings, folder, name, sizes(settings, kv, this_host()), server, api_keys(settings), metrics)
