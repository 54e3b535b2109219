"""Which kernels one call runs, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("as_strided", "t", "transpose", "permute", "expand", "view", "_unsafe_view", "reshape"),
        *("_reshape_alias", "detach", "alias", "unsqueeze", "squeeze", "flatten", "unflatten"),
        *("empty", "empty_strided", "empty_like", "resize_", "resolve_conj", "resolve_neg"),
    )
)
_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv"))


def kernels_of(call: Callable[[], object], device: torch.device) -> list[str]:
    """Names of what one warm call runs, in order.

    CUDA: every kernel, copy and fill on the device. CPU, where there are no launches to count:
    matrix products, and the innermost of the other operators that touch data.
    """
    call()
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as recorded:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    events: list[Any] = list(recorded.events())
    if cuda:
        found = [e for e in events if e.device_type == DeviceType.CUDA]
    else:
        found = [e for e in events if e.name in _PRODUCTS or _touches_data(e)]
    found.sort(key=lambda e: e.time_range.start)
    return [e.name for e in found]


def _touches_data(event: Any) -> bool:
    """Whether an operator is no view and calls nothing but views."""
    known = event.name.startswith(("aten::", "mkldnn::", "mkl::"))
    inner = (child.name in _VIEWS for child in event.cpu_children)
    return known and event.name not in _VIEWS and all(inner)
