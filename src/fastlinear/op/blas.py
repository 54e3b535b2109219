"""PyTorch's own handles of cuBLAS, before a CUDA graph needs them.

A thread's handle cannot be made while a graph is captured. Users' calls before a capture make those
that PyTorch's ops need; a call of ours may take PyTorch's product only once it is captured.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_made = threading.local()
_of_backwards: set[Any] = set()
"""GPUs whose thread of backwards has a handle."""


def make_ready(device: torch.device, grad: bool = False) -> None:
    """Have handles for a GPU in this thread and, with ``grad``, in the one of its backwards.

    Inside a backward only in this thread: the other may be waiting for it.
    """
    if torch.version.cuda is None:
        return
    _make(device)
    if not grad or device.index in _of_backwards or torch._C._current_graph_task_id() != -1:
        return
    with torch.inference_mode(False), torch.enable_grad():  # no numbers: nothing is launched
        end = torch.empty(0, device=device, requires_grad=True)
        y = end.view_as(end)
        y.register_hook(lambda _: _make(device))
        torch.autograd.grad(y, end, torch.empty(0, device=device))
    _of_backwards.add(device.index)


def _make(device: torch.device) -> None:
    have: set[Any] = _made.__dict__.setdefault("devices", set())
    if device.index in have:
        return
    from fastlinear.native.cuda_driver import loading_allowed

    with torch.cuda.device(device), loading_allowed():
        torch.cuda.current_blas_handle()
    have.add(device.index)
