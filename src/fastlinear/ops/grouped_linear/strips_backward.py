"""Backward of many narrow groups on Hopper, in CUDA C++: ``strips_backward.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.grouped_linear import strips_tiles
from fastlinear.ops.grouped_linear.one_pass import OnePass, gradients, row_stride
from fastlinear.ops.grouped_linear.operands import Backward, Numbers
from fastlinear.ops.grouped_linear.reference import Gradients, Needs
from fastlinear.ops.grouped_linear.strips_backward_config import (
    WORTH_PLAIN,
    StripsBackwardConfig,
    limit,
    service_warps,
    shared_bytes,
    strips_backward_config,
)
from fastlinear.ops.grouped_linear.strips_tiles import (
    SERVICE_REGISTERS,
    SIZE,
    WORTH,
    Cut,
    Split,
    has_dense_rows,
    ordinal,
    side_by_side,
    source_of,
)

ARCH = "sm_90a"
KERNEL, SUMS_KERNEL = "grouped_linear_strips_backward", "grouped_linear_strips_sums"


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
    shared: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": int(dtype is torch.bfloat16),
        "SIZE": SIZE,
        "SHARED": int(shared),
        "K": k,
        "N": n,
        "P": config.groups,
        "PARTS": config.parts,
        "ACROSS": config.across,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "BLOCKS": config.blocks,
        "SERVICE_WARPS": service_warps(config),
        "REGISTERS": limit(config)[0] if service_warps(config) > 1 else 0,
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    return source_of("strips_backward.cu", activation, macros)


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
    shared: bool,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    text = source(dtype, k, n, activation, needs, config, shared)
    cubin = driver.compile_cubin(text, "strips_backward.cu", ARCH)
    room = shared_bytes(config, k, n, activation != "none", needs)
    sums = driver.Kernel(cubin, SUMS_KERNEL, 0, device)
    return driver.Kernel(cubin, KERNEL, room, device), sums


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    reason = strips_tiles.reason_not(p)
    if reason is not None:
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    if strips_backward_config(side_by_side(p.option("order"), m, groups), k, n) is None:
        return strips_tiles.no_strip(p)
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens or groups first, rows at 16 bytes."""
    return (
        x.shape[0] == 1
        and x.element_size() == SIZE
        and all(
            t is None or (t.dtype is x.dtype and has_dense_rows(t, order)) for t in (dy, saved, x)
        )
        and weight.dtype is x.dtype
        and weight.is_contiguous()
    )


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: StripsBackwardConfig | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed, in one pass and the sums of its shares.

    Args:
        dy: (B, L, G, N); bfloat16 or float16. What ``serves`` refuses goes to the Triton backend.
        saved: (B, L, G, N), dtype of dy: the output y for relu, leaky_relu, sigmoid and tanh, the
            pre-activation for the others, None for ``"none"``.
        x: (B, L, G, K), dtype of dy.
        weight: (G, N, K), dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration; None picks ``strips_backward_config``.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype, in a fixed order.
    """
    groups, n, k = weight.shape
    if activation == "none":
        saved = None
    if config is None:
        side = side_by_side(order, x.shape[1], groups)
        config = strips_backward_config(side, k, n, saved is not None, needs)
    empty = not x.numel() * dy.numel() or not any(needs)
    if config is None or empty or not serves(dy, saved, x, weight, order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    given = dy, saved, x, weight
    return gradients(StripsBackward, *given, activation, needs, order, config)


def backward_steps(call: Backward) -> Numbers | None:
    """``backward`` as steps of a program; None where it is more than its launches."""
    dy, saved, x, weight = call.tensors
    groups, n, k = weight.shape
    side = side_by_side(call.order, x.shape[1], groups)
    config = strips_backward_config(side, k, n, saved is not None, call.needs)
    if config is None or not any(call.needs) or not serves(dy, saved, x, weight, call.order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward_steps(call)
    plan = StripsBackward(*call.tensors, call.activation, call.needs, call.order, config)
    return plan.steps(call)


class StripsBackward(OnePass):
    """The launches of ``strips_backward.cu``."""

    MAPS = ("dy", "saved", "x", "dx")
    POINTERS = ("weight", "dw", "db", "dy", "saved", "x", "dx")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: Needs,
        order: str,
        config: StripsBackwardConfig,
    ) -> None:
        super().__init__(ordinal(x))
        _, m, groups, k = x.shape
        n = weight.shape[1]
        cut = Cut.of(order, m, groups, config.groups)
        how = (activation, needs, config, cut.shared)
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, *how, self._device)
        units = device_facts(x.device).units
        worth = WORTH_PLAIN if saved is None else WORTH
        split = Split(cut.strips, cut.tiles, units * config.blocks, worth)
        slots = split.slots * (cut.p if cut.shared else 1)

        def tiles(t: Tensor, dense: bool = False) -> driver.TensorMap:
            place = row_stride(t, dense), t.data_ptr(), self._device
            return cut.map(t.dtype, t.shape[3], *place)

        maps = [tiles(dy), tiles(x if saved is None else saved), tiles(x), tiles(x, dense=True)]
        whose = (cut.tiles, split.each, split.more)
        threads = 32 * (config.groups * config.parts + service_warps(config))
        numbers = (cut.rows, groups, slots, *whose)
        self._prepare_pass(kernel, threads, 1, split.blocks, maps, numbers)
        self._prepare_sums(driver.Launch, sums, weight, needs, slots, 2, (groups, *whose))
