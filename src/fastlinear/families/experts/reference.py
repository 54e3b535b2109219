"""experts in plain PyTorch: the readable oracle, and the backend ``eager``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.families.experts.gate import Gate
from fastlinear.families.grouped.ragged import products

_BYTES = 16  # that rows of torch's grouped product begin at


def experts(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    routing: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    gate: Gate,
    first: int,
) -> Tensor:
    """y of ``with_pre``."""
    return with_pre(x, weights, routing, gate, first)[0]


def with_pre(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    routing: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    gate: Gate,
    first: int,
) -> tuple[Tensor, Tensor]:
    """``y_t = Σ_j w_tj (h_tj W_downᵀ + b_down)``, ``h_tj = gate(x_t W_gate_upᵀ + b_gate_up)``.

    Slots (token, choice) are sorted by expert. Gathering and combining permute them, so that every
    gradient is added in a fixed order.

    Args:
        x: (T, H).
        weights: gate_up (E, 2I, H) and down (E, H, I).
        routing: topk_index and topk_weight (T, k), gate_up_bias (E, 2I) and down_bias (E, H).
        gate: what lies between the products.
        first: the expert of the first weight.

    Returns:
        y (T, H), and what comes before the gate, (T k, 2I) sorted by expert; both differentiable.
        A slot whose expert has no weight here adds nothing.
    """
    gate_up, down = weights
    index, weight, gate_up_bias, down_bias = routing
    (tokens, top), count = index.shape, gate_up.shape[0]
    index = index.long()
    here = (index >= first) & (index < first + count)
    keys, order = torch.where(here, index - first, count).flatten().sort(stable=True)
    numbers = torch.arange(max(count + 1, len(order)), dtype=keys.dtype, device=x.device)
    sizes = torch.searchsorted(keys, numbers[: count + 1]).diff()
    place = torch.empty_like(order).scatter(0, order, numbers[: len(order)].long())
    rows = x[:, None].expand(tokens, top, x.shape[1]).flatten(0, 1)[order]
    owned = (keys < count)[:, None]
    pre = _multiply(rows, gate_up, sizes, gate_up_bias, keys, owned)
    slots = _multiply(gate.value(pre), down, sizes, down_bias, keys, owned)[place]
    shares = torch.where(here, weight, 0)[..., None]
    return (slots.unflatten(0, (tokens, top)) * shares).sum(1).to(x.dtype), pre


def _multiply(
    rows: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None, keys: Tensor, owned: Tensor
) -> Tensor:
    """x_s W_eᵀ + b_e for rows sorted by expert; zeros for those of none."""
    if not has_grouped_product(rows, weight):
        return products.loop(rows, weight, sizes, bias, "none")
    # torch's grouped product leaves rows of no group unwritten, in the gradient as well
    given = rows.masked_fill(~owned, 0)
    found: Tensor = F.grouped_mm(given, weight.mT, offs=sizes.cumsum(0, dtype=torch.int32))
    if bias is not None:
        found = found + bias[keys.clamp(max=len(bias) - 1)]
    return found.masked_fill(~owned, 0)


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all experts in one call that waits for nothing.

    On Blackwell it leaves gradients of experts without rows unwritten (PyTorch issue 172439).
    """
    if x.device.type != "cuda" or x.dtype is not torch.bfloat16:
        return False
    numbers = (*weight.shape[1:], *weight.stride())
    aligned = all(n == 1 or n * x.itemsize % _BYTES == 0 for n in numbers)
    dense = 1 in weight.stride()[1:] and weight.data_ptr() % _BYTES == 0
    return aligned and dense and (8, 0) <= torch.cuda.get_device_capability(x.device) < (10, 0)
