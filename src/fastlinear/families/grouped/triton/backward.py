"""Triton backend of grouped_linear's backward on sm_80 and later: any strides, nothing copied.

Tensors of tokens are (B, L, G, features) views. Importing this file imports Triton, so it is
imported lazily.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.activations.reference import math_of
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.families.grouped.sign_mask import Channels, is_sign_mask
from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.backward_kernels import (
    _backward_kernel,
    _grad_pre_kernel,
    _grad_weight_kernel,
    _sum_chunks_kernel,
)
from fastlinear.families.grouped.triton.config import (
    BackwardConfig,
    Walk,
    backward_config,
    dot_precision,
    padded,
    weight_config,
)
from fastlinear.families.grouped.triton.forward import Product
from fastlinear.kernels.triton.launch import Launch

__all__ = ["backward"]

Tensor = torch.Tensor
_SUM_BLOCK = 1024
_DERIVED = 2048  # numbers of a tile of dpre

_plans: dict[Any, Any] = {}


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: BackwardConfig | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed: one pass over x and dy where a group's dW fits a
    program's registers, else products apart.

    Args:
        dy: (B, L, G, N) of any strides.
        saved: (B, L, G, N) of any strides: what the activation saves,
            its output y or the pre-activation; None for ``"none"``; of relu and leaky_relu its
            signs instead, as ``sign_mask.Channels`` has them.
        x: (B, L, G, K) of any strides, dtype of dy.
        weight: (G, N, K) of any strides, dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration of the single pass; None picks ``backward_config``.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype. Deterministic: chunks of tokens are summed in a
        fixed order.
    """
    if activation == "none":
        saved = None
    sign_mask = saved if saved is not None and is_sign_mask(saved) else None
    if sign_mask is not None:
        saved = Channels.rows(sign_mask)
    if not dy.numel() * x.numel() or tensors.far_apart(dy, saved, x, weight):
        if sign_mask is not None:
            saved = Channels.of(sign_mask, dy.shape[3]).unpacked(sign_mask, dy.dtype)
        return reference.backward(dy, saved, x, weight, activation, needs, order)
    groups, n, k = weight.shape
    if config is None:
        config = _config(x, weight, activation, sign_mask is not None)
    if saved is not None and (config is None or config.dpre_first):
        dpre, db = _grad_pre(dy, saved, activation, needs[2])
        if not any(needs[:2]):
            return None, None, db
        rest = (*needs[:2], False)
        dx, dw, _ = backward(dpre, None, x, weight, "none", rest, order, config=config)
        return dx, dw, db
    dx = tensors.empty(x.shape, order, x) if needs[0] else None
    dw = tensors.vector((groups, n, k), x) if needs[1] else None
    if config is None:
        db = _grad_pre(dy, None, activation, True)[1] if needs[2] else None
        if dx is not None:
            turned = weight.transpose(1, 2)
            key = ("dx", *tensors.facts_of(dy, weight, dx))
            _plan(key, lambda: Product(dy, turned, dx, "none")).launch(dy, turned, None, dx, None)
        if dw is not None:
            key = ("dw", *tensors.facts_of(dy, x))
            _plan(key, lambda: _GradWeight(dy, x)).run(dy, x, dw)
        return _all_rounded(dx, dw, None, x)[:2] + (db,)
    db = tensors.vector((groups, n), x) if needs[2] else None
    key = ("all", *tensors.facts_of(dy, saved, x, weight, dx), activation, needs, config)
    make = lambda: _SinglePass(dy, saved, x, weight, dx, activation, needs, config)  # noqa: E731
    _plan(key, make).run(dy, saved, x, weight, dx, dw, db)
    return _all_rounded(dx, dw, db, x)


def _derived_at_once(dy: Tensor, saved: Tensor | None) -> tuple[int, int]:
    """Tokens and outputs of a tile of dpre, long where these lie side by side."""
    length, n = dy.shape[1], padded(dy.shape[3])
    if all(t is None or tensors.strides_of(t)[1][1] == "row" for t in (dy, saved)):
        block_m = min(1024, padded(length))
        return block_m, min(_DERIVED // block_m, n)
    return 16, min(_DERIVED // 16, n)


def _config(x: Tensor, weight: Tensor, activation: str, sign_mask: bool) -> BackwardConfig | None:
    """Of the single pass; None where there is none."""
    batch, length, groups, k = x.shape
    facts = x.element_size(), tensors.units_of(x.device), tensors.capability_of(x.device)
    sizes = batch * length, groups, k, weight.shape[1]
    return backward_config(*sizes, *facts, activation, sign_mask, x.stride(1) == 1)


def _grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dpre (B, L, G, N) lies as saved does, and is dy where saved is None."""
    groups, n = dy.shape[2:]
    dpre = None if saved is None else tensors.empty(dy.shape, _order_of(saved), dy)
    db = tensors.vector((groups, n), dy) if need_bias_grad else None
    key = ("dpre", *tensors.facts_of(dy, saved), activation, need_bias_grad)
    _plan(key, lambda: _GradPre(dy, saved, dpre, activation, need_bias_grad)).run(
        dy, saved, dpre, db
    )
    return (
        dy if dpre is None else tensors.rounded(dpre, dy),
        None if db is None else tensors.rounded(db, dy),
    )


# --------------------------------------------------------------------------------------------
# Plans: launches for tensors of one kind


class _SinglePass:
    """One launch for all gradients, and one for the sums over chunks where there are several."""

    __slots__ = ("_launch", "_sums")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        dx: Tensor | None,
        activation: str,
        needs: Needs,
        config: BackwardConfig,
    ) -> None:
        groups, n, k = weight.shape
        tokens = x.shape[0] * x.shape[1]
        place = tensors.Tiles(x, config.block_m)
        share = place.tiles, groups, config.programs
        # rows of all groups lie together where tokens come first: programs stay beside each other
        apart = x.stride(2) <= x.stride(1)
        walk = Walk.quickest(*share, not apart) if config.shared else Walk.apart(*share)
        columns = -(-k // config.block_k)
        self._launch = Launch(
            _backward_kernel,
            (walk.programs * columns,),
            (
                *(*place.shape, place.tiles, walk.room, walk.each, columns, groups),
                *tensors.arguments(dy, saved, x, weight, dx),
                *(k, n, config.block_m, config.block_k, padded(n)),
                *(activation, math_of(x.dtype), dot_precision(n), dot_precision(tokens)),
                *(place.across, config.stages, walk.shared, x.device.type == "cpu"),
            ),
            x.device,
            warps=config.warps,
            stages=config.stages,
        )
        self._sums = _Sums((groups, n, k), walk, needs[1], needs[2], x)

    def run(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch; dw and db are contiguous, None where not wanted."""
        dw_part, db_part = self._sums.parts(dw, db)
        self._launch(dy, saved, x, weight, dx, dw_part, db_part)
        self._sums.run(dw_part, db_part, dw, db)


class _GradPre:
    """dpre = dy act'(pre) and its sums over tokens."""

    __slots__ = ("_launch", "_sums")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        dpre: Tensor | None,
        activation: str,
        need_bias_grad: bool,
    ) -> None:
        groups, n = dy.shape[2:]
        block_m, block_n = _derived_at_once(dy, saved)
        place = tensors.Tiles(dy, block_m)
        columns = -(-n // block_n)
        programs = 8 * tensors.units_of(dy.device)
        walk = Walk.apart(place.tiles, groups, programs // columns)
        self._launch = Launch(
            _grad_pre_kernel,
            (groups * columns, walk.chunks),
            (
                *(*place.shape, place.tiles, walk.each, columns, groups),
                *tensors.arguments(dy, saved, dpre),
                *(n, block_m, block_n, activation, math_of(dy.dtype), place.across),
            ),
            dy.device,
            warps=4,
        )
        self._sums = _Sums((groups, n, 0), walk, False, need_bias_grad, dy)

    def run(self, dy: Tensor, saved: Tensor | None, dpre: Tensor | None, db: Tensor | None) -> None:
        """Launch; db is contiguous, None where not wanted."""
        _, part = self._sums.parts(None, db)
        self._launch(dy, saved, dpre, part)
        self._sums.run(None, part, None, db)


class _GradWeight:
    """dW_g = dpre_gᵀ x_g, in tiles of dW and chunks of tokens."""

    __slots__ = ("_launch", "_sums")

    def __init__(self, dpre: Tensor, x: Tensor) -> None:
        batch, length, groups, k = x.shape
        n, tokens = dpre.shape[3], batch * length
        facts = x.element_size(), tensors.units_of(x.device), tensors.capability_of(x.device)
        config = weight_config(tokens, groups, k, n, *facts)
        place = tensors.Tiles(x, config.block_m)
        chunks = -(-place.tiles // config.tiles)
        walk = Walk(chunks * config.tiles, config.tiles, groups * chunks, chunks)
        columns = -(-k // config.block_k)
        self._launch = Launch(
            _grad_weight_kernel,
            (-(-n // config.block_n) * columns, groups, chunks),
            (
                *(*place.shape, place.tiles, config.tiles, columns, groups),
                *tensors.arguments(dpre, x),
                *(k, n, config.block_m, config.block_n, config.block_k, dot_precision(tokens)),
                *(place.across, x.device.type == "cpu"),
            ),
            x.device,
            warps=config.warps,
            stages=config.stages,
        )
        self._sums = _Sums((groups, n, k), walk, True, False, x)

    def run(self, dpre: Tensor, x: Tensor, dw: Tensor) -> None:
        """Launch; dw (G, N, K) is contiguous."""
        part, _ = self._sums.parts(dw, None)
        self._launch(dpre, x, part)
        self._sums.run(part, None, dw, None)


class _Sums:
    """Where chunks of tokens leave their shares of dW and db, and the launch that adds them up."""

    __slots__ = ("_launch", "_shapes")

    def __init__(
        self, sizes: tuple[int, int, int], walk: Walk, dw: bool, db: bool, like: Tensor
    ) -> None:
        groups, n, k = sizes
        self._shapes = (walk.chunks, groups, n, k), (walk.chunks, groups, n)
        self._launch = None
        if walk.chunks > 1 and (dw or db):
            numbers = n * k, n
            blocks = [min(_SUM_BLOCK, padded(size)) for size in numbers]
            programs = [
                groups * -(-size // block) if wanted else 0
                for size, block, wanted in zip(numbers, blocks, (dw, db), strict=True)
            ]
            rest = (groups, programs[0], walk.room, walk.each, *numbers, *blocks, walk.chunks)
            self._launch = Launch(_sum_chunks_kernel, (sum(programs),), rest, like.device, warps=4)

    def parts(self, dw: Tensor | None, db: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """float32 memory for the shares, or the results themselves where one chunk is all."""
        if self._launch is None:
            return dw, db
        return (
            None if dw is None else tensors.workspace(self._shapes[0], dw),
            None if db is None else tensors.workspace(self._shapes[1], db),
        )

    def run(self, *shares_and_results: Tensor | None) -> None:
        """Add up (dw's shares, db's shares, dw, db), in a fixed order."""
        if self._launch is not None:
            self._launch(*shares_and_results)


def _plan(key: Any, make: Any) -> Any:
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def _order_of(t: Tensor) -> str:
    """The order of memory in which t (B, L, G, features) is dense, "tokens" where in none."""
    return next((order for order in layouts.ORDERS if layouts.is_dense(t, order)), "tokens")


def _all_rounded(
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, like: Tensor
) -> Gradients:
    return (
        None if dx is None else tensors.rounded(dx, like),
        None if dw is None else tensors.rounded(dw, like),
        None if db is None else tensors.rounded(db, like),
    )
