"""Turns one call of a callable into an :class:`Entry`: inspect, check the padding, warm, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import FastlinearError, UnsupportedError
from fastlinear.core.graph_inspect import Inspection, raised_line
from fastlinear.core.graphs import Pool, Recorder
from fastlinear.nn.graph_arguments import Outputs, tensors_of
from fastlinear.nn.graph_entry import Entry
from fastlinear.nn.graph_watch import Watch

Run = Callable[[Sequence[Tensor]], Any]
# a result that depends on the number of rows changes with it, here fourfold or more
_SIZE_DEPENDENCE = 0.05


class CannotPad(Exception):
    """Rows cannot be compared, as the callable draws random numbers or repeats no result."""


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
                returned, entry.saved = _saving(run, copies, watch)
            del copies, outside
            inspection.restore()
            entry.structure = Outputs(returned)
            entry.padded_out = [False] * len(tensors_of(returned))
            del returned
            if entry.bucket is not None:
                if inspection.random:
                    raise CannotPad
                entry.padded_out = _padded_outputs(entry, run, tensors, inspection)
            generators = [g for g, _ in inspection.generators]
            _capture(
                entry, run, tensors, by_address, watch, recorder, pool, grad, warmup, generators
            )
        finally:
            torch.clear_autocast_cache()
            inspection.restore()
            if inspection.random:
                for generator, before in [(default, state), *inspection.generators]:
                    generator.set_state(before)


def _saving(run: Run, copies: Sequence[Tensor], watch: Watch) -> tuple[Any, list[int]]:
    """One run, and which watched tensors' values its backward would read."""
    places = {t.untyped_storage()._cdata: i for i, t in enumerate(watch.tensors)}
    saved: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        place = places.get(t.untyped_storage()._cdata)
        if place is not None:
            saved.add(place)
        return t.detach()

    torch.clear_autocast_cache()  # cast weights kept from before are none of the graph's
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        returned = run(copies)
    torch.clear_autocast_cache()
    return returned, sorted(saved)


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

    def backward(outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        made = [o for o in outputs if o.requires_grad]
        if not made:
            return ()
        if not entry.dys:
            entry.dys = [torch.zeros_like(o) for o in made]
        return torch.autograd.grad(made, wanted, entry.dys, allow_unused=True)

    try:
        recorder.warm(lambda: backward(forward()) if grad else forward(), device, warmup)
        entry.forward = recorder.record(forward, device, pool, generators)
        outputs = entry.forward.outputs
        entry.differentiable = [grad and o.requires_grad for o in outputs]
        if any(entry.differentiable):
            entry.backward = recorder.record(lambda: backward(outputs), device, pool, generators)
            grads = iter(entry.backward.outputs)
            entry.grads = [next(grads) if t.requires_grad else None for t in inputs]
    except (FastlinearError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(
            "graphed",
            expected="kernels only, as a CUDA graph records them",
            received=f"{str(error).splitlines()[0]}{raised_line(error)}",
            remedy="Leave that part outside the graphed callable.",
        ) from error
    entry.outputs = [o.detach() for o in outputs]
    entry.forward.outputs = None  # frees the autograd graph
    entry.statics = [None if i in by_address else t.detach() for i, t in enumerate(live)]


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


# --------------------------------------------------------------------------------------------
# Padding


def _padded_outputs(
    entry: Entry, run: Run, tensors: Sequence[Tensor], inspection: Inspection
) -> list[bool]:
    """Which outputs hold rows. Raises UnsupportedError where padding changes a real row.

    Sharp: at one size, only the padding's values changed, real rows must keep every bit. Coarse:
    a quarter of the bucket or less, with and without padding, must agree.
    """
    dim, bucket = entry.batch_dim, entry.bucket
    assert bucket is not None
    rows = next(t.shape[dim] for t, p in zip(tensors, entry.padded_in, strict=True) if p)
    few = min(rows, max(1, bucket // 4))
    short = [
        t.detach().narrow(dim, 0, few) if p else t.detach()
        for t, p in zip(tensors, entry.padded_in, strict=True)
    ]

    def outputs(fill: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        given = [t.clone() for t in short]
        if fill is not None:
            for i, t in enumerate(short):
                if entry.padded_in[i]:
                    shape = list(t.shape)
                    shape[dim] = bucket - few
                    rest = fill(t.narrow(dim, 0, 1)).expand(shape)
                    given[i] = torch.cat([t, rest], dim)
        try:
            with torch.no_grad():
                return tensors_of(run(given))
        except (RuntimeError, ValueError, IndexError) as error:
            raise _not_rowwise(f"an error on {given[0].shape[dim]} rows: {error}") from error
        finally:
            torch.clear_autocast_cache()
            inspection.restore()

    plain = outputs(None)
    if few == bucket:
        return [o.dim() > dim and o.shape[dim] == bucket for o in plain]
    same, again, other = outputs(torch.clone), outputs(torch.clone), outputs(_unlike)
    padded = []
    for i, (p, s) in enumerate(zip(plain, same, strict=True)):
        is_rows = s.dim() > dim and s.shape[dim] == bucket and p.shape[dim] == few
        padded.append(is_rows)
        a, b, c = (o[i].narrow(dim, 0, few) if is_rows else o[i] for o in (same, again, other))
        if a.shape != p.shape:
            raise _not_rowwise(f"output {i} of shape {tuple(s.shape)} for {bucket} rows")
        if not _identical(a, b):
            raise CannotPad
        if not _identical(a, c):
            raise _not_rowwise(f"output {i}, whose rows change with what is in other rows")
        if not _near(a, p):
            raise _not_rowwise(f"output {i}, whose rows change with the number of rows")
    return padded


def _unlike(row: Tensor) -> Tensor:
    """Other values that such a row may hold: for whole numbers 0, an index into anything."""
    if row.dtype is torch.bool:
        return ~row
    return 2 - 3 * row if row.is_floating_point() else torch.zeros_like(row)


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return _identical(a, b)
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() <= _SIZE_DEPENDENCE * b.norm())


def _not_rowwise(received: str) -> UnsupportedError:
    return UnsupportedError(
        "graphed",
        expected="a callable that treats every row of the batch alone, as batch_dim promises",
        received=received,
        remedy="Leave batch_dim out for a graph of each exact size (or call eval() where a layer "
        "takes statistics of the batch).",
    )
