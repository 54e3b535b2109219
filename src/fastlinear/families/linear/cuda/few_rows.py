"""CUDA C++ backend of linear_act for few rows on Hopper: W is read once, straight to registers.

``few_rows_single.cu`` (float32 multiply-adds) and ``few_rows_half.cu`` (matrix units) hold the
device source, ``few_rows_config.py`` the choice of their shapes. Launches set up while the one
before is ending. Accumulation is in float32, in a fixed order: results are deterministic. Inference
only.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CUDA_HEADER, cuda_macros
from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda.few_rows_config import (
    POOL_PERCENT,
    Config,
    HalfConfig,
    config_for,
    padded_rows,
    reason_not,
    spread,
)
from fastlinear.kernels.cuda.hopper import WORDS, EarlyLaunch
from fastlinear.kernels.cuda.prepared import Plans, Prepared
from fastlinear.native import cuda_driver as driver

__all__ = ["ARCH", "forward", "reason_not", "source"]

ARCH = "sm_90a"
KERNEL = "linear_act_few_rows"
_FOLDER = Path(__file__).parent
_AHEAD = 64 << 10  # bytes of W of a block


def source(
    config: Config, dtype: torch.dtype, rows: int, K: int, activation: str, has_bias: bool
) -> str:
    """The complete CUDA C++ source of one specialisation, for ``rows`` padded rows."""
    macros: dict[str, int | str] = {
        "ROWS": rows,
        "STEPS": config.steps,
        "CL": config.cluster,
        "HAS_BIAS": int(has_bias),
        **cuda_macros("library", activation),
    }
    if isinstance(config, HalfConfig):
        file = "few_rows_half.cu"
        macros |= {"MT": config.tiles, "WN": config.wn, "WK": config.wk}
        macros |= {"IS_BF16": int(dtype == torch.bfloat16), "AHEAD": _AHEAD}
    else:
        file = "few_rows_single.cu"
        macros |= {"COLS": config.cols, "WARPS": config.warps, "MANY": int(config.many(K))}
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    files = WORDS, CUDA_HEADER, _FOLDER / "few_rows.cu", _FOLDER / file
    return defines + "".join(path.read_text() for path in files)


_cubins: dict[str, bytes] = {}
_kernels: dict[tuple[str, int, int | None], driver.Kernel] = {}
_plans: Plans[_Plan] = Plans()


class _Plan:
    """One prepared launch: fixed shapes and strides, any addresses."""

    def __init__(
        self, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> None:
        (M, K), N = x.shape, weight.shape[0]
        rows, device = padded_rows(M, x.dtype), x.device.index
        text = source(config, x.dtype, rows, K, activation, bias is not None)
        strips = -(-N // config.block_n)
        needed = config.shared_bytes(rows, K)
        units = device_facts(x.device).units
        blocks = strips * config.cluster
        fetched = x.dtype.itemsize == 2 and units * _AHEAD >= N * K * 2
        shared_bytes, pooled = spread(blocks, needed, config.static_bytes(rows), units, fetched)
        kernel = _kernel(text, shared_bytes, device, POOL_PERCENT if pooled else None)
        places = [ctypes.c_void_p(0) for _ in range(4)]
        numbers = [M, K, N, x.stride(0), weight.stride(0)]
        if isinstance(config, HalfConfig):
            numbers.append(config.spans(K))
        arguments: list[Any] = [*places]
        arguments += [ctypes.c_int(number) for number in numbers]
        launch = EarlyLaunch(kernel, config.threads, config.cluster, arguments)
        launch._config.shared_bytes = shared_bytes  # the kernel's own is its longest K's
        if launch.max_clusters() < strips:
            launch._config.shared_bytes = needed
        launch.set_grid(blocks)
        self.launch = launch
        numbered = [(place, i) for i, place in enumerate(places)]
        self.run = Prepared(launch, device, numbered, {2: 7})  # x, weight, bias, y


def _kernel(text: str, shared_bytes: int, device: int, carveout: int | None) -> driver.Kernel:
    """The kernel of a source, compiled once; the limit of its shared memory only grows."""
    key = text, device, carveout
    kernel = _kernels.get(key)
    if kernel is None or kernel.shared_bytes < shared_bytes:
        if text not in _cubins:
            _cubins[text] = driver.compile_cubin(text, "few_rows.cu", ARCH)
        kernel = driver.Kernel(_cubins[text], KERNEL, shared_bytes, device, carveout)
        _kernels[key] = kernel
    return kernel


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    *,
    config: Config | None = None,
) -> tuple[Tensor, None]:
    """y = act(x weightᵀ + bias) in one launch; x or bias that is not aligned is copied before it.

    A weight whose address is no multiple of 16 is left to PyTorch's product: copying it at every
    call would cost more.

    Args:
        x: (M, K); M at most 16 in float32, 64 in bfloat16 and float16; unit stride along K.
        weight: (N, K), unit stride along K.
        bias: (N,) or None.
        activation: a public activation name.
        save_pre: False.
        config: the kernel's shape; chosen by ``config_for`` when None.

    Returns:
        (y, None): y (M, N) contiguous.

    Raises:
        UnsupportedError: where :func:`reason_not` gives a reason.
    """
    index = x.device.index
    if x.data_ptr() % 16:
        x = x.clone()
    if weight.data_ptr() % 16:
        _require_served(x, weight, save_pre, config)
        return reference.forward(x, weight, bias, activation, False)[0], None
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 8):
        bias = bias.clone(memory_format=torch.contiguous_format)
    key = (
        x.shape,
        weight.shape[0],
        x.stride(),
        weight.stride(),
        x.dtype,
        bias is None,
        activation,
        save_pre,
        config,
        index,
    )
    y = x.new_empty((x.shape[0], weight.shape[0]))
    plan = _plans.of(key, lambda: _new_plan(x, weight, bias, activation, save_pre, config))
    plan.run(x, weight, bias, y)
    return y, None


def _new_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    config: Config | None,
) -> _Plan:
    _require_served(x, weight, save_pre, config)
    driver.make_current(x.device.index)
    with torch.cuda.device(x.device), driver.loading_allowed():
        chosen = config or config_for(*x.shape, weight.shape[0], x.dtype)
        return _Plan(chosen, x, weight, bias, activation)


def _require_served(x: Tensor, weight: Tensor, save_pre: bool, config: Config | None) -> None:
    (M, K), N = x.shape, weight.shape[0]
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    given = x.dtype, x.stride(), weight.stride(), capability, save_pre, config
    reason = reason_not(M, K, N, *given)
    if reason is not None:
        raise UnsupportedError(
            "linear_act (few_rows backend)",
            "a problem this backend serves",
            reason,
            "Choose another backend or leave the choice to dispatch.",
        )
