"""CUDA graphs: recording, replaying, memory pools, and the order of streams.

Everything that touches a graph goes through a :class:`Recorder`, so that what is built on top
(keys, buckets, padding, eviction) runs the same with another recorder where there is no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from fastlinear.core.graph_table import POWERS_OF_TWO, Table, bucket_of, checked_buckets

__all__ = [
    "POWERS_OF_TWO",
    "CudaRecorder",
    "CudaRecording",
    "Pool",
    "Recorder",
    "Recording",
    "Table",
    "bucket_of",
    "checked_buckets",
]


class Pool:
    """Memory that graphs of one pool share; a new handle once every graph in it is gone.

    torch refuses to record into a pool whose graphs have all been freed.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.graphs = 0

    def enter(self) -> Any:
        """The handle to record one more graph into."""
        if not self.graphs:
            self.handle = torch.cuda.graph_pool_handle()
        self.graphs += 1
        return self.handle

    def leave(self) -> None:
        """One graph of the pool is gone, or was never finished."""
        self.graphs -= 1


class Recording(Protocol):
    """A recorded run: ``outputs`` is what it returned, at the addresses ``replay`` writes."""

    outputs: Any

    def replay(self, fill: Callable[..., object] | None = None, *given: Any) -> None:
        """Enqueue the recorded kernels on the current stream of the recording's device.

        ``fill(*given)``, which writes to the recording's buffers, goes first, in order behind every
        earlier use of its memory.
        """

    def holders(self, storage: int) -> int:
        """How many tensors of the recording's own share this memory (an id of ``_cdata``)."""


class Recorder(Protocol):
    """What records and replays: CUDA graphs, or something that acts like them in a test."""

    device_type: str

    def busy(self) -> bool:
        """Whether the current stream is being recorded already."""

    def warm(self, run: Callable[[], object], device: torch.device, times: int) -> None:
        """Run off the record first: libraries load, kernels compile, workspaces are made."""

    def record(
        self,
        run: Callable[[], Any],
        device: torch.device,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
    ) -> Recording:
        """Record one run. What it raises comes out as it was raised; nothing stays recorded."""

    def settle(self, device: torch.device) -> None:
        """Wait for all work of the device."""


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


class CudaRecorder:
    """Records CUDA graphs on a side stream, in thread-local capture mode.

    Other threads may allocate and synchronize while this one records.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def busy(self) -> bool:
        """Whether the current stream is being captured."""
        return _has_cuda() and torch._C._cuda_isCurrentStreamCapturing()

    def warm(self, run: Callable[[], object], device: torch.device, times: int) -> None:
        """Run ``times`` times on the side stream, after and before the current one's work."""
        side, current = self._side(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.device(device), torch.cuda.stream(side):
            for _ in range(times):
                run()
        current.wait_stream(side)
        self.settle(device)

    def record(
        self,
        run: Callable[[], Any],
        device: torch.device,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
    ) -> CudaRecording:
        """Capture one run. The pool is left, and the allocator put right, where it fails."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self.settle(device)
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that calls CUDA would break the capture
        handle = pool.enter()
        try:
            with torch.cuda.device(device), torch.cuda.stream(self._side(device)):
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    outputs = run()
                except BaseException:
                    self._abandon(graph, device, handle, generators)
                    raise
                graph.capture_end()
        except BaseException:
            pool.leave()
            raise
        finally:
            if collecting:
                gc.enable()
        return CudaRecording(graph, outputs, pool, device)

    def settle(self, device: torch.device) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(device)

    def _abandon(
        self,
        graph: torch.cuda.CUDAGraph,
        device: torch.device,
        handle: Any,
        generators: Sequence[torch.Generator],
    ) -> None:
        """End a capture that failed, and put right what torch then leaves behind."""
        try:
            graph.capture_end()
            return
        except RuntimeError:
            # The allocator believes that a capture is under way, and would never again use memory
            # freed on another stream. Newer versions of torch end it themselves and raise here.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index or 0, handle)
        # So do the generators: they would refuse to draw. A capture that succeeds ends theirs.
        tiny = torch.empty(1, device=device)
        good = torch.cuda.CUDAGraph()
        for generator in generators:
            good.register_generator_state(generator)
        good.capture_begin(capture_error_mode="thread_local")
        tiny.zero_()
        good.capture_end()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(index)
        return self._streams[index]


class CudaRecording:
    """One captured graph; freed with its memory when nothing refers to it any more.

    ``graph`` itself is for who replays it on one stream only, such as a clock.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, outputs: Any, pool: Pool, device: torch.device
    ) -> None:
        self.outputs = outputs
        self.graph = graph
        self._pool = pool
        self._replay = graph.replay
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def replay(self, fill: Callable[..., object] | None = None, *given: Any) -> None:
        """Enqueue on the current stream, after every earlier replay on any other stream.

        Graphs share memory: their pool, and cuBLAS's workspace of the stream they were captured
        on.
        """
        with _order:
            if _last_raw.get(self._device) != _raw_stream(self._device):
                _follow(self._device)
            if fill is not None:
                fill(*given)
            self._replay()

    def holders(self, storage: int) -> int:
        """None: a graph knows addresses only."""
        return 0

    def __del__(self) -> None:
        self._pool.leave()


def _follow(device: int) -> None:
    """Put the current stream behind the last one; the caller holds ``_order``."""
    if _last_raw.get(device) != _raw_stream(device):
        current = torch.cuda.current_stream(device)
        if device in _last:
            current.wait_stream(_last[device])
        _last[device], _last_raw[device] = current, current.cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda device: 0)
_order = threading.Lock()
_last: dict[int, torch.cuda.Stream] = {}
_last_raw: dict[int, int] = {}
