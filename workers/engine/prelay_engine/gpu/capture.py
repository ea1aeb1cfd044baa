"""CUDA graphs by torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..errors import CaptureError, OutOfMemory
from .memory import is_out_of_memory

#: Runs before a capture. The first compiles kernels and makes handles and workspaces; the second proves it has.
WARM_UPS = 2


class TorchCapture:
    """Captures what the calling thread does on one device. See `graphs.Capture`.

    All graphs take what they compute in between from one pool of memory, and are captured on one stream: only so can
    a later capture reuse what an earlier one has let go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._unfinished: list[torch.cuda.CUDAGraph] = []

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002 - `run` knows them
        failure: OutOfMemory | CaptureError | None = None
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            try:
                self._record(graph, run)
            except (RuntimeError, OutOfMemory) as error:  # the former is what torch, CUDA and Triton raise
                failure = _translated(error)
        if failure is not None:  # out here, where the error no longer keeps alive what its frames hold on the device
            self._start_over(graph)
            raise failure
        return graph.replay

    @torch.inference_mode()
    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        torch.cuda.synchronize(self._device)  # what loaded the weights and filled the buffers is on other streams
        # Entered here, because torch.cuda.graph leaves its stream the current one when a capture cannot be ended.
        with torch.cuda.stream(self._stream):
            self._warm_up(run)
            with _uncollected(), self._capturing(graph):
                run()

    def _warm_up(self, run: Callable[[], None]) -> None:
        """On the stream of the capture, for which cuBLAS has its own workspace, and with the very same arguments."""
        for _ in range(WARM_UPS):
            run()
        self._stream.synchronize()  # what went wrong on the device is raised here, not in a capture

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        """Waits for the device, and gives cached memory back to it, before it begins.

        Other threads copy KV blocks meanwhile: only what this thread calls is to be checked.
        """
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _start_over(self, graph: torch.cuda.CUDAGraph) -> None:
        """The next capture has another pool: torch may think that this one is still being captured into."""
        self._pool = torch.cuda.graph_pool_handle()
        if not _ended(graph):
            # Its allocators ask this graph at each allocation whether that is its own: it must not be freed.
            self._unfinished.append(graph)


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether its capture came to an end, good or bad."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected within: freeing somebody's event or pinned memory is a call that a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _translated(error: Exception) -> OutOfMemory | CaptureError:
    cause = error.__context__  # what ended the capture early, if that made ending it fail, too
    for each in (error, cause):
        if each is not None and is_out_of_memory(each):
            return OutOfMemory(_first_line(each))
    return CaptureError(_first_line(error if cause is None else cause))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
