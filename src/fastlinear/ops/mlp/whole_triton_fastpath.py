"""A launch of ``whole_triton``'s forward as the compiled fast path makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastlinear.ops.common.fastpath_launch import FastpathLaunch
from fastlinear.ops.mlp.whole_triton_plans import ForwardPlan

Tensor = torch.Tensor


def in_fastpath(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    y: int,
) -> FastpathLaunch | None:
    """``forward`` of such tensors without what the backward reads, as one launch.

    Its tensors by number: 0 x (M, n_0), then weights, then biases, and y (M, n_L) of that number.
    None where it is more than a launch, or the tensors would be copied first.
    """
    given = [t for t in (*weights, *biases) if t is not None]
    if x.device.index != torch._C._cuda_getDevice() or x.stride(1) != 1 or not x.shape[0]:
        return None
    if any(t.data_ptr() & 15 or not t.is_contiguous() for t in given) or x.data_ptr() & 15:
        return None
    ws, bs = tuple(weights), tuple(biases)
    plan = ForwardPlan(x, ws, bs, (activation, final_activation), False, None)
    if len(plan._chunks) != 1:
        return None
    plan.run(x, ws, bs)  # what is compiled once is launched here
    launch = plan._chunks[0][3]
    layers = len(ws)
    numbers = tuple(range(1, 1 + layers))
    places = tuple(None if b is None else 1 + layers + i for i, b in enumerate(bs))
    found: FastpathLaunch | None = launch.in_fastpath((0, numbers, places, y, (None,) * layers))
    return found
