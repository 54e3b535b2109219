"""What an op's result is said to be, against what PyTorch makes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastlinear.fastpath.aten_results import result_of

ATEN = torch.ops.aten
_MEMORY = torch.arange(20_000, dtype=torch.float16)


def drawn(draw: random.Random) -> Tensor:
    """Up to four dimensions in any order, dense, with gaps, overlapping or expanded."""
    shape = [draw.choice((1, 1, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.3:
        strides = [draw.choice((0, 0, 1, 1, 2, 3, 4, 6, 12, 24)) for _ in shape]
        return _MEMORY.as_strided(shape, strides)
    strides, step = [0] * len(shape), draw.choice((1, 1, 2))
    for i in draw.sample(range(len(shape)), len(shape)):
        strides[i] = step
        step *= shape[i] * draw.choice((1, 1, 2))
    expanded = draw.random() < 0.4
    return _MEMORY.as_strided(
        shape, [0 if expanded and draw.random() < 0.4 else s for s in strides]
    )


@pytest.mark.parametrize(
    ("op", "more"),
    [
        (ATEN._to_copy.default, (torch.float32, None, None, None, False, None)),
        (ATEN.clone.default, (None,)),
        (ATEN.neg.default, ()),
        (ATEN.add.Tensor, "twice"),
    ],
    ids=str,
)
def test_results_lie_as_pytorchs_do(op: Callable[..., Tensor], more: object) -> None:
    draw = random.Random(7)
    told = 0
    for _ in range(4000):
        t = drawn(draw)
        if isinstance(more, tuple):
            given = (t, *more)
            made = op(t, dtype=more[0]) if len(more) > 1 else op(t)
        else:
            given, made = (t, t, 1), op(t, t)
        found = result_of(op, given)
        if found is None:
            continue
        told += 1
        assert found.shape == tuple(made.shape)
        assert found.dtype == made.dtype
        assert found.strides is not None
        lie = zip(made.shape, made.stride(), found.strides, strict=True)
        assert all(size == 1 or real == ours for size, real, ours in lie), (t.shape, t.stride())
    assert told > 3000
