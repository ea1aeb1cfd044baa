"""Keeps a set of processes running, and stops them in order. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from .child import Child, ChildSpec, Sink
from .errors import ChildFailed, CliError
from .restart import GiveUp, RestartPolicy, describe


class Keeper:
    """One place in the fleet: the process in it now, and the task that fills it again."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.policy = RestartPolicy()
        self.unwanted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Keeper({self.spec.name}, pid={self.child.pid if self.child else None}, {self.policy!r})"


class Supervisor:
    """Starts what it is given and restarts it when it dies, until told otherwise.

    `failure` becomes an exception when a child is given up; the owner then stops everything. Call from the
    main thread: children die with the thread that started them.
    """

    def __init__(self, sink: Sink, restarted: Callable[[str], None] | None = None) -> None:
        """`restarted` hears the name of each child that ended by itself and is started again."""
        self._sink = sink
        self._restarted = restarted
        self.keepers: dict[str, Keeper] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_up = False
        self.hurry = asyncio.Event()

    def keep(self, spec: ChildSpec) -> Keeper:
        """Start a child and keep it running."""
        keeper = Keeper(spec)
        self.keepers[spec.name] = keeper
        keeper.task = asyncio.create_task(self._keep(keeper), name=f"keep {spec.name}")
        return keeper

    async def stop(self, names: Iterable[str]) -> None:
        """Stop these together: SIGTERM, then SIGKILL after each one's own patience, or at once in a hurry."""
        keepers = [self.keepers[name] for name in names if name in self.keepers]
        for keeper in keepers:
            keeper.unwanted.set()
        await asyncio.gather(*(keeper.task for keeper in keepers if keeper.task))

    async def or_failure(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; when a child is given up first, cancel it and raise why."""
        doing = asyncio.create_task(work)
        try:
            await asyncio.wait({doing, self.failure}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.failure.result()
            doing.result()
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    def close(self) -> None:
        """After the last stop: a failure that nobody asked for is not reported as lost."""
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()

    async def _keep(self, keeper: Keeper) -> None:
        try:
            while not keeper.unwanted.is_set():
                await self._run_once(keeper)
        except CliError as error:
            self._give_up(keeper.spec, error)

    async def _run_once(self, keeper: Keeper) -> None:
        """1 prepare, 2 start, 3 wait for its end, 4 tell and judge, 5 wait and try again. Ends it when unwanted."""
        spec = keeper.spec
        if spec.before_start is not None and not await _unless(keeper.unwanted, spec.before_start()):
            return
        begun = time.monotonic()
        try:
            child = keeper.child = await Child.start(spec, self._sink)
        except OSError as error:
            raise ChildFailed(f"{spec.name} cannot be started: {error}") from None
        if not await _unless(keeper.unwanted, child.wait()):
            await self._end(child)
            return
        code = await child.wait()
        if spec.after_death is not None:
            await _unless(keeper.unwanted, spec.after_death(child.pid))
        decision = keeper.policy.on_exit(time.monotonic() - begun, code, self.started_up)
        if isinstance(decision, GiveUp):
            words = f": {spec.last_words()}" if spec.last_words else ""
            raise ChildFailed(f"{spec.name} {decision.why}{words}", child.tail)
        if self._restarted is not None:
            self._restarted(spec.name)
        self._sink(spec.name, f"ended with {describe(code)}; starts again in {decision.delay_s:g} s")
        await _unless(keeper.unwanted, asyncio.sleep(decision.delay_s))

    async def _end(self, child: Child) -> None:
        ending = asyncio.create_task(child.stop())
        if not await _unless(self.hurry, asyncio.shield(ending)) and child.spec.death_signal is signal.SIGKILL:
            child.send(signal.SIGKILL)  # the server alone keeps its patience: it has data to sync
        await ending

    def _give_up(self, spec: ChildSpec, error: CliError) -> None:
        if spec.given_up is not None:
            spec.given_up(error)
        elif not self.failure.done():
            self.failure.set_exception(error)


async def _unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Await `work` unless `event` is set first; then cancel it. True when the work was done; raises what it raised."""
    doing = asyncio.ensure_future(work)
    interrupt = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
            return True
        return False
    finally:
        for task in (doing, interrupt):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, CliError):
                    await task
