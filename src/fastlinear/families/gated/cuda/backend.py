"""Backend ``cuda`` of gated_mlp for Hopper: the gate in the epilogue of products by TMA and wgmma.

``forward.cu`` is gate and up projection as one product, ``backward.cu`` the gradient of what the
gate lets through, which is never written. Both hide the epilogue under the next tile's product.
``backward.cu`` also leaves partial sums of the bias gradients, which ``bias_sums.py`` adds up.
Products without a gate are what linear_act takes for such layers.
Every element is written by one block in a fixed order: results are deterministic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import is_captured
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.dispatch.select import select
from fastlinear.families.gated import reference
from fastlinear.families.gated.cuda.bias_sums import (
    bias_gradients,
    column_sums,
    empty_shares,
    share_of,
)
from fastlinear.families.gated.cuda.config import Config, config_for
from fastlinear.families.gated.cuda.plans import compiled, launch_of, readable, run
from fastlinear.families.gated.layers import products_for
from fastlinear.families.gated.problem import has_down
from fastlinear.families.gated.products import Sums, backward_through_down
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    empty_like,
    empty_pre,
    hidden,
    split_biases,
    split_pre,
    split_weights,
)
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.linear import reference as layers
from fastlinear.kernels.cuda.hopper import (
    BK,
    HALF_DTYPES,
    THREADS,
    EarlyLaunch,
    device_source,
    operand_layout,
)
from fastlinear.kernels.cuda.prepared import Place, Prepared
from fastlinear.native import cuda_driver as driver

_HERE = Path(__file__).parent
_MOST_DOWNS = 1024
_MOST_FEW_ROWS = 32 << 20  # bytes of a weight
_MAX_SIZE = 1 << 30  # tile coordinates are 32-bit


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, or None."""
    return why_no_hopper(p) or reason_not_sizes(p)


def reason_not_sizes(p: Problem) -> str | None:
    """The same, whatever the device is."""
    if p.dtype not in HALF_DTYPES.values():
        return f"needs bfloat16 or float16, not {p.dtype}"
    if p.piece == "backward" and not has_down(p):
        return "without a down projection there is no product to hold the gate's derivatives"
    if p.option("w") != "dense":
        return "weights must be dense"
    if p.option("order") == "interleaved" and (p.needs_grad or p.piece != "forward"):
        return "interleaved pre-activations have no rows that TMA could move"
    sizes = [p.dim(name) for name in ("K", "H", *(("N",) if p.piece == "backward" else ()))]
    if any(size % 8 for size in sizes):
        return f"rows must be multiples of 16 bytes, got features {sizes}"
    if min(p.dim("M"), *sizes) < 1 or max(p.dim("M"), *sizes) > _MAX_SIZE:
        return f"sizes must be from 1 to 2^30, got M={p.dim('M')} and features {sizes}"
    return None


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K), bfloat16 or float16 → (y (M, N) or (M, H), then the pre-activations or None
    twice)."""
    pre = empty_pre(x, hidden(weights), order) if save_pre else None
    h = gate(x, split_weights(weights, order), split_biases(biases, order), activation, pre, order)
    y = h if weights.down is None else down_projection(h, weights.down, biases.down)
    return (y, *pre) if pre is not None else (y, None, None)


def backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool = False,
) -> Gradients:
    """dy (M, N), dense, bfloat16 or float16 → the seven gradients; pre None is formed again from
    x. ``over`` allows to write over pre."""
    if not any(needs[i] for i in (0, 1, 2, 4, 5)):
        rest = reference.backward(
            dy, pre, x, weights, biases, activation, order, (*needs[:6], False)
        )
        return *rest[:6], column_sums(dy) if needs[6] else None
    products = products_for(x)
    if pre is None:
        pre, over = products.pre_activations(x, weights, biases), True
    return backward_through_down(
        products, through_down, dy, pre, x, weights, activation, order, needs, over
    )


def gate(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
    pre: Pre | None,
    order: str,
    config: Config | None = None,
) -> Tensor:
    """h (M, H) = act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu), dense.

    Args:
        x: (M, K); copied unless its rows are dense and begin at multiples of 16 bytes.
        weights: gate and up, (H, K) each with K contiguous.
        biases: theirs, (H,) or None.
        activation: its name.
        pre: memory for the pre-activations, or None.
        order: how they lie in it.
        config: tile configuration; chosen where None.
    """
    x = readable(x)
    given = [readable(w) for w in weights]
    bias = [None if b is None else b.contiguous() for b in biases]
    bias = [b.clone() if b is not None and b.data_ptr() % 4 else b for b in bias]
    m, size = x.shape[0], weights[0].shape[0]
    h = x.new_empty(m, size)
    kept = [] if pre is None else list(split_pre(pre, order))
    tensors = [x, *given, h, *(kept or (h, h)), *bias]
    held = bias[0] is None, bias[1] is None
    made = config or config_for("forward", m, size)
    key = _key("forward", (x, *given), activation, *held, order, pre is None, made)
    run(key, lambda: gate_plan(tensors, activation, pre is not None, made), x, tensors)
    return h


def gate_plan(tensors: Sequence[Any], activation: str, save: bool, config: Config) -> Prepared:
    """The launch of ``gate`` for tensors laid out as these are: x, two weights, h, two
    pre-activations (h where ``save`` is not asked for), two biases or None."""
    x, h, biases = tensors[0], tensors[3], tensors[6:]
    (m, k), size, half = x.shape, h.shape[1], config.bn // 2
    slots: list[Place] = [
        _operand(x, config.bm),
        *(_operand(w, half) for w in tensors[1:3]),
        *(_output(t, 32) for t in tensors[3:6]),
        *(ctypes.c_void_p(0) for _ in biases),
    ]
    macros = {
        "GATE_BIAS": int(biases[0] is not None),
        "UP_BIAS": int(biases[1] is not None),
        "SAVE": int(save),
    }
    kernel = _kernel("forward", config, x, activation, macros, False)
    return _product(kernel, config, x, slots, (size, *_tiles(config, m, half, size, k)))


def down_projection(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """h Wdᵀ + bd, h (M, H) and weight (N, H), by what linear_act takes for such a layer."""
    y: Tensor = down_choice(h, weight, bias)[1](h, weight, bias, "none", False)[0]
    return y


def down_choice(
    h: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[str, Callable[..., tuple[Tensor, Any]]]:
    """The backend of linear_act that ``down_projection`` takes: its name and its function.

    Not the kernels of few rows for large weights: behind ``gate``, whose end they begin under,
    those take longer than behind each other, as which they were measured.
    """
    key = h.shape, weight.shape, weight.stride(), h.dtype, h.device, bias is None, is_captured(h)
    found = _downs.get(key)
    if found is None:
        m, size = h.shape
        p = linear_act.problem(
            *("forward", m, size, weight.shape[0]),
            dtype=HALF_DTYPES[h.dtype],
            device="cuda",
            bias=bias is not None,
            precision=matmul_precision(h.dtype),
            captured=is_captured(h),
        )
        if len(_downs) >= _MOST_DOWNS:
            _downs.clear()
        with torch.cuda.device(h.device):
            choice = select(p)
        found = choice.backend.name, choice.load()
        if found[0] == "few_rows" and weight.nbytes > _MOST_FEW_ROWS:
            found = "eager", layers.forward
        _downs[key] = found
    return found


def through_down(
    dy: Tensor,
    down: Tensor,
    pre: Pre,
    activation: str,
    order: str,
    needs: tuple[bool, bool, bool],
    needs_h: bool,
    over: bool = False,
    config: Config | None = None,
) -> tuple[Pre, Tensor | None, Sums]:
    """(dpre laid out as pre, h (M, H) or None, bias gradients) from dy (M, N) and down (N, H).

    Args:
        needs: which bias gradients are wanted: of the gate (or the stack), the up and the down
            projection.
        needs_h: whether what the gate lets through is wanted.
        over: whether dpre may take the memory of pre.
        config: tile configuration; chosen where None.
    """
    dy, down = readable(dy), readable(down)
    (m, n), size = dy.shape, down.shape[1]
    dpre = pre if over else empty_like(pre)
    read = [readable(t) for t in split_pre(pre, order)]
    h = dy.new_empty(m, size) if needs_h else None
    made = config or config_for("backward", m, size)
    sums = None
    if any(needs[:2]):
        shape = (2, sums_rows(made, m, n, size), size)
        sums = torch.empty(shape, dtype=torch.float32, device=dy.device)
    shares = empty_shares(dy) if needs[2] else None
    given = *read, *split_pre(dpre, order)
    summed = sums, None if shares is None else dy, shares
    tensors = [dy, down, *given, given[0] if h is None else h, *summed]
    how = activation, order, sums is None, shares is None, needs_h, made
    key = _key("backward", (dy, down, *read), *how)
    run(key, lambda: through_plan(tensors, activation, needs_h, made), dy, tensors)
    return dpre, h, bias_gradients(sums, shares, order, needs, dy)


def sums_rows(config: Config, m: int, n: int, size: int) -> int:
    """Rows of the sums that a backward of dy (M, N) leaves for each bias gradient (H,)."""
    tiles = _tiles(config, m, config.bn, size, n)[0]
    return tiles * config.cluster * config.bm // config.rows_per_consumer * 4


def through_plan(
    tensors: Sequence[Any], activation: str, needs_h: bool, config: Config
) -> Prepared:
    """The launch of ``through_down`` for tensors laid out as these are: dy, the down weight, two
    pre-activations, their two gradients, h (any other where ``needs_h`` is not asked for), the sums
    or None, dy and its shares or None twice."""
    dy, down, sums, shares = tensors[0], tensors[1], tensors[7], tensors[9]
    (m, n), size = dy.shape, down.shape[1]
    slots: list[Place] = [
        _operand(dy, config.bm),
        driver.TensorMap(
            *(HALF_DTYPES[dy.dtype], n, size, down.stride(0), BK // config.cluster, 64),
            *(down.data_ptr(), dy.device.index),
        ),
        *(_output(t, config.block) for t in tensors[2:7]),
        *(ctypes.c_void_p(0) for _ in tensors[7:]),
    ]
    wanted = {"SUMS": int(sums is not None), "DOWN_SUMS": int(shares is not None)}
    macros = {"NEED_H": int(needs_h), **wanted}
    kernel = _kernel("backward", config, dy, activation, macros, True)
    tiles = _tiles(config, m, config.bn, size, n)
    rows = m, n, dy.stride(0), share_of(m)
    return _product(kernel, config, dy, slots, (sums_rows(config, m, n, size), size, *rows, *tiles))


def _product(
    kernel: driver.Kernel,
    config: Config,
    like: Tensor,
    slots: Sequence[Place],
    counts: Sequence[int],
) -> Prepared:
    """The launch of a product; the counts end with its tiles."""
    arguments = [*slots, *(ctypes.c_int(count) for count in counts)]
    launch = EarlyLaunch(kernel, THREADS, config.cluster, arguments)
    tiles = counts[-3] * counts[-2]
    launch.set_grid(min(tiles, launch.max_clusters()) * config.cluster)
    return launch_of(launch, like, slots)


_downs: dict[Any, tuple[str, Callable[..., Any]]] = {}
cache.on_change(_downs.clear)


def source(
    piece: str,
    config: Config,
    dtype: torch.dtype,
    activation: str,
    macros: dict[str, int],
    b_mn: bool,
) -> str:
    """The complete CUDA C++ source of one specialisation of a piece's kernel."""
    own = {
        "BM": config.bm,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "PINGPONG": int(config.pingpong),
        "GROUP_M": config.group_m,
        "SETS": config.sets,
        "BLOCK_COLS": config.block,
        **macros,
    }
    first, last = _HERE / "dy_sums.h", (_HERE / f"{piece}.cu").read_text()
    return device_source(first, own, config.bn, dtype, activation, False, b_mn) + last


def _kernel(
    piece: str, config: Config, like: Tensor, activation: str, macros: dict[str, int], b_mn: bool
) -> driver.Kernel:
    key = (piece, config, like.dtype, activation, tuple(macros.items()), like.device.index)
    shared = config.shared_bytes(piece)

    def text() -> str:
        return source(piece, config, like.dtype, activation, macros, b_mn)

    return compiled(key, f"gated_{piece}", shared, text)


def _key(piece: str, tensors: Sequence[Tensor], *rest: Any) -> Any:
    """What a launch is made for; the tensors that are not named follow from these."""
    first = tensors[0]
    return (piece, first.dtype, first.device, *[(t.shape, t.stride()) for t in tensors], *rest)


def _operand(t: Tensor, box: int) -> driver.TensorMap:
    """Blocks of ``box`` rows and 64 columns of a matrix with dense rows."""
    layout = operand_layout(tuple(t.shape), t.stride())
    assert layout is not None
    name, (rows, cols) = HALF_DTYPES[t.dtype], t.shape
    return driver.TensorMap(name, rows, cols, layout[1], box, 64, t.data_ptr(), t.device.index)


def _output(t: Tensor, columns: int) -> driver.TensorMap:
    """Blocks of 16 rows and so many columns, as a warp moves them."""
    rows, cols = t.shape
    stride = t.stride(0) if rows > 1 else cols
    where = t.data_ptr(), t.device.index
    name, narrow = HALF_DTYPES[t.dtype], columns == 32
    return driver.TensorMap(name, rows, cols, stride, 16, columns, *where, narrow=narrow)


def _tiles(config: Config, m: int, width: int, columns: int, depth: int) -> tuple[int, int, int]:
    """Tiles along the rows, along the columns, and steps along the depth."""
    return -(-m // (config.bm * config.cluster)), -(-columns // width), -(-depth // BK)
