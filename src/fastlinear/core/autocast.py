"""Casting a parameter to the autocast dtype once per autocast block, in torch's own cache.

Autocast keeps the 16-bit copy of every float32 parameter until the outermost block ends, but no
call asks it for one. A product of no rows with the parameter fills the cache, and the copy is the
operand which that product's graph has saved.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

_MAX_EMPTY = 1024
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_empty: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
# absent from a torch that does not say whether hooks would see the saved operand
_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in the autocast dtype; a parameter's copy is the one autocast keeps, or comes to keep.

    Differentiable back to t. Tensors autocast would not cache (not float32, no leaf, a view, no
    gradient required) are cast anew, as are all while torch's cache is off, a compiler traces, a
    CUDA graph is being captured or hooks on saved tensors are active. float64 and integers are left
    alone.

    Args:
        t: of any shape; only vectors and matrices are cached.
        dtype: the dtype autocast has for t's device; autocast must be enabled for it.
    """
    if t.dtype is torch.float64 or not t.is_floating_point():
        return t
    if (
        t.dtype is torch.float32
        and type(t) in _PLAIN
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
        and t.requires_grad
        and t.is_leaf
        and not t._is_view()
        and 1 <= t.dim() <= 2
        and t.numel()
        and torch.is_autocast_cache_enabled()
        and _saved_hooks is not None
        and _saved_hooks(True) is None
        and not (t.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        kept = _cached(t, dtype)
        # one cached under no_grad has no way back to t
        if kept.dtype is dtype and (kept.requires_grad or not torch.is_grad_enabled()):
            return kept
    return t.to(dtype)


def _cached(t: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _cached(t, dtype)
    n = t.shape[0]
    rows = _empty.get((n, dtype, t.device))
    if rows is None:
        if len(_empty) >= _MAX_EMPTY:
            _empty.clear()
        rows = torch.empty(0, n, dtype=dtype, device=t.device, requires_grad=True)
        _empty[n, dtype, t.device] = rows
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        product = torch.matmul(rows, t).grad_fn  # (0, N) @ (N, K), or @ (N,)
    kept: Tensor = product._saved_mat2 if t.dim() == 2 else product._saved_vec  # type: ignore[union-attr]
    return kept
