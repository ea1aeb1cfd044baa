"""What the checks are about, found out when a check first asks, and once."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from prelay_engine.cpu import Cpu, this_cpu
from prelay_engine.demo import default_cache
from prelay_engine.native import shipped
from prelay_engine.native.build import NoKernels, compiler, place
from prelay_kv.cuda.paths import PINNED
from prelay_text.errors import TextError
from prelay_text.fingerprint import fingerprint

from ..binaries import ServerBinary, find_server
from ..cards import places
from ..device import check_device
from ..embedded import EmbeddedServer, written_by
from ..errors import CliError, ModelUnavailable
from ..geometry import Geometry
from ..host import SHM, Host, space, this_host
from ..model import resolve_with_progress
from ..redact import redact
from ..roles import geometry
from ..segments import Segments, look_at_segments, sweep_segments
from ..settings import Settings
from ..sizing import Sizes, pool_bytes, sizes
from ..statedir import StateDir, socket_path
from ..supervisor import Supervisor
from .cuda import Cuda, look_at_cuda
from .examine import JobsServer, Server, examine, look_at_jobs_server
from .fleets import Looks
from .gpus import Gpus, look_at_cards, look_for_gpus
from .ongpus import Namespaces, OnGpus, Pinned, own_namespaces
from .places import Files, Port, State, look_at_files, look_at_port, look_at_state
from .toolchain import TorchBuild, Triton, look_at_torch, look_at_triton

T = TypeVar("T")


class NothingToLookAt(Exception):  # noqa: N818 - reads as the fact it states
    """There is none of what a check is about, and another row says so."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU, the cores that may be used, the dtype that is asked for, and whether workers compute on it at all."""

    cpu: Cpu
    host: Host
    dtype: str
    computes: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """A folder that can be served. `kv` is None for the null model."""

    folder: Path
    kv: Geometry | None


@dataclass(frozen=True, slots=True)
class Swept:
    """The segments, after those named in `removed` were taken away."""

    segments: Segments
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pools:
    """Room for KV, and what the pools of this configuration take: `decode` bytes of memory, `prefill` bytes of
    /dev/shm, or none of both where KV lies on GPUs. No `planned` where `problem` says why that cannot be told, or None
    where the model's row says it."""

    host: Host
    shm: int
    planned: Sizes | None = None
    decode: int = 0
    prefill: int = 0
    problem: CliError | None = None
    on_gpus: bool = False


@dataclass(frozen=True, slots=True)
class Native:
    """What is asked of the kernels, and the compiler for them, or why there is none and what came along instead."""

    kernels: str
    quantization: str
    compiler: str = ""
    problem: str = ""
    is_compiled: bool = False
    shipped: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers of each kind, threads of each of them, and the cores that all share."""

    prefill: int
    decode: int
    unified: int
    threads: int
    cores: int
    on_gpus: bool = False


@dataclass(frozen=True, slots=True)
class Binary:
    """The server program of the private server, and whether one is wanted."""

    found: ServerBinary | None
    is_wanted: bool


def _once(find: Callable[[Facts], T]) -> Callable[[Facts], T]:
    """Remember the answer of a method, also a CliError: the same object is raised again."""

    @functools.wraps(find)
    def ask(facts: Facts) -> T:
        known = facts.known
        if find.__name__ not in known:
            try:
                known[find.__name__] = find(facts)
            except (CliError, NothingToLookAt) as error:
                known[find.__name__] = error
        found = known[find.__name__]
        if isinstance(found, CliError | NothingToLookAt):
            raise found
        return found  # type: ignore[no-any-return]

    return ask


class Facts:
    """Each method finds one thing out. It raises CliError where that cannot be known."""

    def __init__(self, settings: Settings, fix: bool = False, shm: Path = SHM) -> None:
        """With `fix`, segments that the dead left in `shm` are removed; nothing else is ever changed."""
        self._settings = settings
        self._fix = fix
        self._shm = shm
        self.known: dict[str, Any] = {}

    def settings(self) -> Settings:
        return self._settings

    def processor(self) -> Processor:
        return Processor(this_cpu(), self.host(), self._settings.dtype, computes=not self._on_gpus)

    @property
    def _on_gpus(self) -> bool:
        return self._settings.on_gpus

    @_once
    def gpus(self) -> Gpus:
        if not self._on_gpus:
            return look_for_gpus()
        return replace(self._cards(), seen=len(self._cuda().devices))

    @_once
    def _cards(self) -> Gpus:
        return look_at_cards()

    @_once
    def _cuda(self) -> Cuda:
        workers = places(self._settings)
        found = OnGpus(workers, Cuda())
        probed = () if self._settings.kv_transport == PINNED else found.prefilling
        return look_at_cuda(found.used, found.pairs, probed)

    @_once
    def torch_build(self) -> TorchBuild:
        self._only_on_gpus()
        check_device(self._settings)
        return look_at_torch()

    @_once
    def triton(self) -> Triton:
        """Raise NothingToLookAt where it is not installed either: the row of torch says so."""
        try:
            self.torch_build()
        except CliError:
            raise NothingToLookAt from None
        return look_at_triton()

    @_once
    def on_gpus(self) -> OnGpus:
        self._only_on_gpus()
        cards = {card.uuid: card for card in self._cards().cards}
        settings = self._settings
        running = self.state().is_running
        return OnGpus(places(settings), self._cuda(), cards, settings.dtype, settings.kv_transport, running)

    def visible(self) -> OnGpus:
        """Raise NothingToLookAt where CUDA sees no GPU: the row of its runtime says why."""
        found = self.on_gpus()
        if not found.cuda.devices:
            raise NothingToLookAt
        return found

    def between_gpus(self) -> OnGpus:
        """Raise NothingToLookAt where no decode worker reads from another GPU than its own."""
        found = self._all_there()
        if not found.pairs:
            raise NothingToLookAt
        return found

    def prefilling(self) -> OnGpus:
        """Raise NothingToLookAt where nothing is handed over."""
        found = self._all_there()
        if not found.prefilling or any(map(found.is_filled, found.used)):
            raise NothingToLookAt
        return found

    def measured(self) -> OnGpus:
        """Raise NothingToLookAt where the running `prelay serve` has left no memory to look with."""
        found = self.visible()
        if any(found.is_filled(number) for number in found.used if number < len(found.cuda.devices)):
            raise NothingToLookAt
        return found

    def _all_there(self) -> OnGpus:
        """Raise NothingToLookAt where a GPU is named that is not there: the row of the cards says so."""
        found = self.visible()
        if found.used and found.used[-1] >= len(found.cuda.devices):
            raise NothingToLookAt
        return found

    @_once
    def pinned(self) -> Pinned:
        """Raise NothingToLookAt where KV takes another path, or a row before says why nothing can be told."""
        on, settings = self.prefilling(), self._settings
        try:
            kv = self.model().kv
        except CliError:
            raise NothingToLookAt from None
        if kv is None or not on.by_pinned:
            raise NothingToLookAt
        block = kv.token_bytes(4 if settings.dtype == "float32" else 2) * settings.block_size
        context = -(-(settings.max_model_len or kv.context_len) // settings.block_size)
        most = sum(int(place.share * on.total(place.gpu)) for place in on.by_pinned.values())
        blocks = settings.prefill_kv_blocks or 0
        return Pinned(len(on.by_pinned), self.host().shm_free, blocks * block, context * block, most, block)

    def namespaces(self) -> Namespaces:
        """Raise NothingToLookAt where this process has none of its own, or no worker can be anywhere else."""
        self._only_on_gpus()
        own = own_namespaces()
        if not own or self._settings.url is None:
            raise NothingToLookAt
        return Namespaces(own)

    def _only_on_gpus(self) -> None:
        if not self._on_gpus:
            raise NothingToLookAt

    @_once
    def segments(self) -> Swept:
        removed = sweep_segments(self._shm) if self._fix else ()
        return Swept(look_at_segments(self._shm), removed)

    @_once
    def host(self) -> Host:
        """The machine as `prelay serve` will find it: it sweeps first, and a running one has its room already."""
        here, found = this_host(), self.segments().segments
        room = sum(found.left.values()) + (sum(found.used.values()) if self.state().is_running else 0)
        return replace(here, shm_free=here.shm_free + room, memory_free=min(here.memory, here.memory_free + room))

    @_once
    def model(self) -> Model:
        folder = resolve_with_progress(self._settings.model)
        return Model(folder, geometry(self._settings, folder))

    @_once
    def pools(self) -> Pools:
        host = self.host()
        found = Pools(host, space(self._shm)[0], on_gpus=self._on_gpus)
        try:
            kv = self.model().kv
        except CliError:
            return found
        try:
            planned = sizes(self._settings, kv, host)
        except CliError as error:
            return replace(found, problem=error)
        if self._on_gpus:
            return replace(found, planned=planned)
        decode, prefill = pool_bytes(self._settings, kv, host, planned)
        return replace(found, planned=planned, decode=decode, prefill=prefill)

    @_once
    def native(self) -> Native:
        """Raise NothingToLookAt for the null model, which computes nothing, and on GPUs."""
        if self._settings.null_model or self._on_gpus:
            raise NothingToLookAt
        found = Native(self._settings.kernels, self._settings.quantization)
        try:
            command = compiler()
            return replace(found, compiler=command, is_compiled=place(default_cache(), command).exists())
        except NoKernels as error:
            came = shipped.library(this_cpu())
            return replace(found, problem=str(error), shipped=came.name if came else "")

    def placement(self) -> Placement:
        """Raise NothingToLookAt where the workers' sizes cannot be told."""
        pools = self.pools()
        if pools.planned is None:
            raise NothingToLookAt
        return Placement(*self._settings.counts(), pools.planned.threads, pools.host.cores, self._on_gpus)

    @_once
    def state(self) -> State:
        return look_at_state(self._settings)

    @_once
    def port(self) -> Port:
        return look_at_port(self._settings, self.state())

    @_once
    def files(self) -> Files:
        """Where files and batches are; raise NothingToLookAt where there are none."""
        settings = self._settings
        if settings.files_dir is not None:
            return look_at_files(settings.files_dir.absolute())
        if settings.url is not None or not settings.batch:
            raise NothingToLookAt
        return look_at_files(settings.state_dir.absolute() / "files")

    @_once
    def jobs_server(self) -> JobsServer:
        """The server of RQ. Raise NothingToLookAt where that is the queue's own."""
        if self._settings.batch_redis_url is None:
            raise NothingToLookAt
        return look_at_jobs_server(self._settings.batch_redis_url.get_secret_value())

    @_once
    def binary(self) -> Binary:
        wanted = self._settings.url is None
        try:
            return Binary(find_server(written_by(self._settings.state_dir / "server") if wanted else None), wanted)
        except CliError:
            if wanted:
                raise
            return Binary(None, wanted)

    @_once
    def server(self) -> Server:
        """The server that is in use: the one given, else that of a running `prelay serve`, else one to try out."""
        if self._settings.url is not None:
            return examine(self._settings.url, redact(self._settings.url), self._fleet())
        if self.state().is_running:
            socket = socket_path(self._settings.state_dir)
            return examine(f"unix://{quote(str(socket))}", f"of the running prelay serve, {socket}", self._fleet())
        self.binary()  # without one its own row says so
        return asyncio.run(_tried_out(self._fleet()))

    def looks(self) -> Looks:
        """Two looks at Redis. Raise NothingToLookAt where there is nothing in it or it may not be read."""
        looks = self.server().looks
        if looks is None or not looks.first.fleets:
            raise NothingToLookAt
        return looks

    def _fleet(self) -> str:
        try:
            return fingerprint(self.model().folder)
        except (ModelUnavailable, TextError):
            return "doctor"


async def _tried_out(fleet: str) -> Server:
    """Start the private server in a scratch directory, ask it everything, and stop it."""
    with tempfile.TemporaryDirectory(prefix="prelay-doctor-") as scratch:
        state = StateDir(Path(scratch))
        try:
            server = EmbeddedServer(state, this_host().memory)
            supervisor = Supervisor(lambda _name, _line: None)
            keeper = supervisor.keep(server.spec())
            try:
                await supervisor.or_failure(server.wait_ready(lambda: keeper.child, lambda _: None))
                return await asyncio.to_thread(examine, server.url, "private, started for this look", fleet)
            finally:
                await supervisor.stop(["server"])
                supervisor.close()
                server.close()
        finally:
            state.close()
