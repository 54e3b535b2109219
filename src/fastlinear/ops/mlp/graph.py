"""The layerwise forward as one CUDA graph: one launch from the host, whatever the depth.

Rows are padded up to the next bucket (each row goes through the layers alone), and the graph reads
the caller's own weights where they lie: their addresses are part of the key, edits in place are
seen by the next replay, and weights elsewhere get a graph of their own. The first calls with a set
of weights are not recorded: weights made anew for each call would be recorded each time.
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.graphs import (
    POWERS_OF_TWO,
    CudaRecorder,
    Pool,
    Recorder,
    Recording,
    Table,
    bucket_of,
)
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.ops.mlp import layerwise
from fastlinear.ops.mlp.reference import Biases, Weights

_MAX_GRAPHS = 32
_WARMUP = 2
_FIRST_CALLS = 2  # of one kind, that go layer by layer
_MAX_SEEN = 1024
_seen: dict[Any, int] = {}
_recorder: Recorder = CudaRecorder()
_graphs: Table[_Graph] = Table(_MAX_GRAPHS)
_pool = Pool()
_lock = threading.RLock()
_recording = threading.local()
_address, _shape, _stride = Tensor.data_ptr, attrgetter("shape"), Tensor.stride


class _Graph:
    """One recording: the buffer of x, the recording, and the buffers of its results."""

    def __init__(self, x: Tensor, recording: Recording, outputs: list[Tensor]) -> None:
        self.x, self.recording, self.outputs = x, recording, outputs


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.device != "cuda":
        return "CUDA graphs need a CUDA device"
    if p.needs_grad:
        return "what the backward reads would be copied out; fastlinear.graphed records a step"
    if p.dim("M") > POWERS_OF_TWO[-1]:
        return f"more than {POWERS_OF_TWO[-1]} rows take longer than the launches a graph saves"
    return layerwise.reason_not(p)


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved) as ``layerwise.forward``, in new memory; x (M, n_0) → y (M, n_L).

    While another graph is being recorded the layers join it, one by one.
    """
    bucket = bucket_of(x.shape[0], POWERS_OF_TWO)
    if bucket is None or getattr(_recording, "on", False) or _recorder.busy():
        return layerwise.forward(x, weights, biases, activation, final_activation, save)
    present = [b for b in biases if b is not None]
    key = (
        bucket,
        x.dtype,
        x.device,
        tuple(map(_address, weights)),
        tuple(map(_shape, weights)),
        tuple(map(_stride, weights)),
        tuple(map(_address, present)),
        None if len(present) == len(biases) else tuple([b is None for b in biases]),
        activation,
        final_activation,
        save,
        matmul_precision(x.dtype),
    )
    with _lock:
        graph = _graphs.get(key)
        calls = 0 if graph is not None else _seen.get(key, 0)
        if graph is None and calls >= _FIRST_CALLS:
            graph = _record(x, bucket, weights, biases, activation, final_activation, save)
            _graphs.put(key, graph)
            _seen.pop(key, None)
        if graph is not None:
            rows = x.shape[0]
            whole = rows == bucket
            graph.recording.order()  # before x is written: another stream may still read it
            (graph.x if whole else graph.x[:rows]).copy_(x)
            graph.recording.replay()
            made = [(o if whole else o[:rows]).clone() for o in graph.outputs]
            return made[0], tuple(made[1:])
        if len(_seen) >= _MAX_SEEN:
            _seen.clear()
        _seen[key] = calls + 1
    return layerwise.forward(x, weights, biases, activation, final_activation, save)


def _record(
    x: Tensor,
    bucket: int,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> _Graph:
    def run() -> list[Tensor]:
        y, saved = layerwise.forward(buffer, weights, biases, activation, final_activation, save)
        return [y, *saved]

    dropped: list[Any] = _graphs.make_room()
    if dropped:  # before its memory is used again
        _recorder.settle(x.device)
    _recording.on = True
    try:
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.zeros(bucket, x.shape[1], dtype=x.dtype, device=x.device)
            _recorder.warm(run, x.device, _WARMUP)
            recording = _recorder.record(run, x.device, _pool)
    finally:
        _recording.on = False
    outputs = [o.detach() for o in recording.outputs]
    return _Graph(buffer, recording, outputs)
