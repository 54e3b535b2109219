"""Whether rows may be added to a batch and cut off again: tried out, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.graph_inspect import Inspection
from fastlinear.cuda_graphs.arguments import tensors_of
from fastlinear.cuda_graphs.entry import Entry
from fastlinear.cuda_graphs.watch import Watch
from fastlinear.cuda_graphs.wide import wide_outputs

Run = Callable[[Sequence[Tensor]], Any]
_NEAR = 0.05  # relative, of results in the callable's own dtypes, by kernels for other sizes
_NEAR_WIDE = 1e-9  # in float64, where rounding is seven orders below that


class CannotPad(Exception):
    """Rows cannot be compared, as the callable draws random numbers or repeats no result."""


def padded_outputs(
    entry: Entry, run: Run, tensors: Sequence[Tensor], inspection: Inspection, watch: Watch
) -> list[bool]:
    """Which outputs hold rows. Raises UnsupportedError where padding changes a real row.

    At one size, only the padding's values changed, real rows must keep every bit. And a quarter of
    the bucket or less, with and without padding, must agree: in float64 to rounding, so that even a
    slight dependence on the number of rows shows; where the callable does not run so, coarsely.
    """
    dim, bucket = entry.batch_dim, entry.bucket
    assert bucket is not None
    rows = next(t.shape[dim] for t, p in zip(tensors, entry.padded_in, strict=True) if p)
    few = min(rows, max(1, bucket // 4))
    short = [
        t.detach().narrow(dim, 0, few) if p else t.detach()
        for t, p in zip(tensors, entry.padded_in, strict=True)
    ]

    def arguments(fill: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        given = [t.clone() for t in short]
        if fill is not None:
            for i, t in enumerate(short):
                if entry.padded_in[i]:
                    shape = list(t.shape)
                    shape[dim] = bucket - few
                    rest = fill(t.narrow(dim, 0, 1)).expand(shape)
                    given[i] = torch.cat([t, rest], dim)
        return given

    def outputs(fill: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        given = arguments(fill)
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
        if not _near(a, p, _NEAR):
            raise _not_rowwise(f"output {i}, whose rows change with the number of rows")
    try:
        calls = arguments(None), arguments(torch.clone)
        wide = wide_outputs(lambda given: tensors_of(run(given)), calls, watch)
    finally:
        inspection.restore()
    if wide is None:
        return padded
    pairs = [
        (p, w.narrow(dim, 0, few) if is_rows else w)
        for p, w, is_rows in zip(*wide, padded, strict=True)
    ]
    # Code that goes around torch's ops may compute something else in float64: that says nothing.
    if all(
        w.shape == p.shape and _near(p, q, _NEAR) for (p, w), q in zip(pairs, plain, strict=True)
    ):
        for i, (p, w) in enumerate(pairs):
            if not _near(w, p, _NEAR_WIDE):
                raise _not_rowwise(f"output {i}, whose rows change with the number of rows")
    return padded


def _unlike(row: Tensor) -> Tensor:
    """Other values that such a row may hold: for whole numbers 0, an index into anything."""
    if row.dtype is torch.bool:
        return ~row
    return 2 - 3 * row if row.is_floating_point() else torch.zeros_like(row)


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _near(a: Tensor, b: Tensor, most: float) -> bool:
    if not a.is_floating_point():
        return _identical(a, b)
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() <= most * b.norm())


def _not_rowwise(received: str) -> UnsupportedError:
    return UnsupportedError(
        "graphed",
        "a callable that treats every row of the batch alone, as batch_dim promises",
        received,
        "Leave batch_dim out for a graph of each exact size (or call eval() where a layer "
        "takes statistics of the batch).",
    )
