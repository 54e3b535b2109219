"""Turns one call of a callable into an :class:`Entry`: inspect, check the padding, warm, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import FastlinearError, UnsupportedError
from fastlinear.core.graph_inspect import Inspection, raised_line
from fastlinear.core.graphs import Pool, Recorder
from fastlinear.cuda_graphs.arguments import Outputs, tensors_of
from fastlinear.cuda_graphs.entry import Entry
from fastlinear.cuda_graphs.padding import CannotPad, Run, padded_outputs
from fastlinear.cuda_graphs.results import Results, apart
from fastlinear.cuda_graphs.watch import Watch

_SPARES = 2  # one that the caller still holds while the next call is under way, and that next one
_SMALL, _SMALL_STEP = 8 << 20, 64 << 20  # bytes that recordings with spares may take


def record(
    entry: Entry,
    run: Run,
    tensors: Sequence[Tensor],
    by_address: set[int],
    watch: Watch,
    recorder: Recorder,
    pool: Pool,
    grad: bool,
    warmup: int,
) -> None:
    """Fill in a new entry.

    Args:
        entry: where the recording goes.
        run: the callable, on the flat list of its tensors.
        tensors: a call's own tensors; they are not modified.
        by_address: positions of tensors that are read and written where they are.
        watch: what the callable reads besides.
        recorder: what records.
        pool: the memory to record into; a training entry has one of its own.
        grad: whether to record a backward as well.
        warmup: how many runs go before the recording.

    Raises:
        UnsupportedError: the callable cannot be recorded; the message names the line.
        CannotPad: rows cannot be compared; record exact sizes.

    What these runs write into buffers, and the random numbers they draw, are put back: afterwards
    it is as if the callable had not run.
    """
    device = entry.device = tensors[0].device
    default = _default_generator(device)
    state = default.get_state()
    inside = [t for i, t in enumerate(tensors) if i in by_address]
    copies = [t if i in by_address else _copy(t) for i, t in enumerate(tensors)]
    outside = [t for i, t in enumerate(copies) if i not in by_address]
    inspection = Inspection("graphed", device, outside, [*watch.tensors, *inside])
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            with inspection:
                returned, entry.saved, entry.saved_out = _saving(run, copies, watch)
            del copies, outside
            inspection.restore()
            entry.structure = Outputs(returned)
            entry.padded_out = [False] * len(tensors_of(returned))
            del returned
            if entry.bucket is not None:
                if inspection.random:
                    raise CannotPad
                entry.padded_out = padded_outputs(entry, run, tensors, inspection, watch)
            generators = [g for g, _ in inspection.generators]
            size = inspection.made_bytes
            size += sum(t.nbytes for t in watch.trainable) if grad else 0
            spares = _SPARES if not entry.once and size <= (_SMALL_STEP if grad else _SMALL) else 0
            _capture(
                entry,
                run,
                tensors,
                by_address,
                watch,
                recorder,
                pool,
                grad,
                warmup,
                generators,
                spares,
            )
        finally:
            torch.clear_autocast_cache()
            inspection.restore()
            if inspection.random:
                for generator, before in [(default, state), *inspection.generators]:
                    generator.set_state(before)


def _saving(run: Run, copies: Sequence[Tensor], watch: Watch) -> tuple[Any, list[int], list[int]]:
    """One run, and which watched tensors' and outputs' values its backward would read."""
    places = {t.untyped_storage()._cdata: i for i, t in enumerate(watch.tensors)}
    storages: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        storages.add(t.untyped_storage()._cdata)
        return t.detach()

    torch.clear_autocast_cache()  # cast weights kept from before are none of the graph's
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        returned = run(copies)
    torch.clear_autocast_cache()
    saved = sorted(i for s, i in places.items() if s in storages)
    outputs = enumerate(tensors_of(returned))
    return returned, saved, [i for i, o in outputs if o.untyped_storage()._cdata in storages]


def _capture(
    entry: Entry,
    run: Run,
    tensors: Sequence[Tensor],
    by_address: set[int],
    watch: Watch,
    recorder: Recorder,
    pool: Pool,
    grad: bool,
    warmup: int,
    generators: Sequence[torch.Generator],
    spares: int,
) -> None:
    device = tensors[0].device
    live = [t if i in by_address else _buffer(entry, i, t, grad) for i, t in enumerate(tensors)]
    # Leaves of their own: those of a graph that waits for its backward belong to its stream.
    leaves = {id(t): t.detach().requires_grad_() for t in watch.trainable if grad}
    inputs = [*live, *[leaves.get(id(t), t) for t in watch.trainable]]
    wanted = [t for t in inputs if t.requires_grad]

    def forward() -> list[Tensor]:
        torch.clear_autocast_cache()
        with watch.swapped(leaves):
            return tensors_of(run(live))

    def backward(outputs: Sequence[Tensor], again: bool = False) -> list[Tensor | None]:
        made = [o for o in outputs if o.requires_grad]
        if not made:
            return []
        if not entry.dys:
            entry.dys = [torch.zeros_like(o) for o in made]
        grads = iter(
            torch.autograd.grad(made, wanted, entry.dys, retain_graph=again, allow_unused=True)
        )
        return [next(grads) if t.requires_grad else None for t in inputs]

    def more(again: Callable[[], Any]) -> list[Results]:
        made = [recorder.record(again, device, Pool(), generators) for _ in range(spares)]
        return [Results(m, m.outputs) for m in made]

    try:
        recorder.warm(lambda: backward(forward()) if grad else forward(), device, warmup)
        entry.forward = recorder.record(forward, device, pool, generators)
        outputs = entry.forward.outputs
        entry.outputs = [o.detach() for o in outputs]
        entry.differentiable = [grad and o.requires_grad for o in outputs]
        if any(entry.differentiable):
            behind = [_leaves_behind(o) for o in outputs if o.requires_grad]
            entry.reaches = [[id(t) in found for t in inputs] for found in behind]
            entry.backward_spares = more(lambda: backward(outputs, again=True))
            entry.backward = recorder.record(lambda: backward(outputs), device, pool, generators)
            entry.grads = entry.backward.outputs
            if not apart([*entry.backward_spares, Results(entry.backward, entry.grads)], True):
                entry.backward_spares = []
        elif not grad:
            entry.spares = more(forward)
            if not apart([*entry.spares, Results(entry.forward, entry.outputs)], False):
                entry.spares = []
    except (FastlinearError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(
            "graphed",
            "kernels only, as a CUDA graph records them",
            f"{str(error).splitlines()[0]}{raised_line(error)}",
            "Leave that part outside the graphed callable.",
        ) from error
    entry.forward.outputs = None  # frees the autograd graph
    held = {t.untyped_storage().data_ptr() for t in [*live, *entry.dys, *watch.tensors]}
    if entry.backward_spares and not held & {o.untyped_storage().data_ptr() for o in outputs}:
        assert entry.backward is not None
        readers = [entry.backward, *[s.recording for s in entry.backward_spares]]
        entry.lendable = Results(entry.forward, entry.outputs, readers)
        entry.outputs = [t for t in entry.lendable.tensors if t is not None]
    entry.statics = [None if i in by_address else t.detach() for i, t in enumerate(live)]


def _leaves_behind(output: Tensor) -> set[int]:
    """The ids of the leaves that a tensor's gradient reaches."""
    found, seen, ahead = {id(output)}, set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.add(id(node.variable))  # type: ignore[attr-defined]
        ahead += [n for n, _ in node.next_functions]
    return found


def _buffer(entry: Entry, i: int, t: Tensor, grad: bool) -> Tensor:
    with torch.no_grad():
        if entry.padded_in[i]:
            shape = list(t.shape)
            shape[entry.batch_dim] = entry.bucket or 0
            new = torch.zeros(shape, dtype=t.dtype, device=t.device)
            new.narrow(entry.batch_dim, 0, t.shape[entry.batch_dim]).copy_(t)
        else:
            new = torch.empty_like(t).copy_(t)
    return new.requires_grad_(grad and t.requires_grad)


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
