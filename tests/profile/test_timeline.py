"""What one call runs: PyTorch's operations on a CPU, kernels on a device."""

from __future__ import annotations

import torch
from torch import nn

from fastlinear.profile.events import Event
from fastlinear.profile.timeline import _kernels, timeline


def test_operations_are_the_outermost_ones_of_both_directions() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    found = timeline(lambda: layer(x).relu().sum().backward(), torch.device("cpu"))
    names = [name for name, _, _ in found.spans]
    assert names[:3] == ["aten::linear", "aten::relu", "aten::sum"]
    assert "aten::addmm" not in names, "inside aten::linear"
    assert "aten::mm" in names, "of the backward, inside a node of autograd"
    starts = [start for _, start, _ in found.spans]
    assert starts == sorted(starts)
    assert all(start >= 0 and start + us <= found.us for _, start, us in found.spans)


def test_kernels_begin_with_the_first() -> None:
    events = [
        Event("op", "aten::mm", 0, 9000, thread=1),
        Event("device", "gate", 7000, 9500),
        Event("runtime", "cudaLaunchKernel", 1000, 2000),
        Event("device", "gemm", 3000, 6000),
    ]
    found = _kernels(events)
    assert found.us == 6.5
    assert found.spans == (("gemm", 0.0, 3.0), ("gate", 4.0, 2.5))
    assert _kernels(events[:1]).spans == ()
