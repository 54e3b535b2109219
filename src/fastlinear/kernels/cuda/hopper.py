"""GEMM kernels for Hopper: what their hosts share.

Device code that they share lies in ``hopper_words.h``, ``hopper_async.h``, ``hopper_gemm.h``,
``hopper_kernel.h``, ``hopper_epilogue.h`` and ``activations/cuda.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastlinear.activations.reference import CUDA_HEADER, cuda_macros
from fastlinear.native import cuda_driver as driver

ARCH = "sm_90a"
BK = 64
"""Steps along K that one stage of the pipeline holds."""
THREADS = 384
"""Of a block: a producer warpgroup and two consumers."""
SHARED_LIMIT = 232_448
"""Bytes of shared memory that a block may have."""
HALF_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
WORDS = Path(__file__).with_name("hopper_words.h")
"""What sources of kernels begin with, behind their macros."""
ASYNC = Path(__file__).with_name("hopper_async.h")
"""Barriers, TMA and wgmma, behind that."""
EPILOGUE = Path(__file__).with_name("hopper_epilogue.h")
"""How tiles of 16-bit products leave, behind ``_HEADERS``."""
RAGGED_HEADER = Path(__file__).with_name("ragged.h")
"""Groups of rows whose sizes only the device knows: what kernels read of them."""
_HEADERS = (
    *(WORDS, CUDA_HEADER, ASYNC),
    *(Path(__file__).with_name(name) for name in ("hopper_gemm.h", "hopper_kernel.h")),
)


def device_source(
    kernel: Path,
    macros: Mapping[str, Any],
    bn: int,
    dtype: torch.dtype,
    activation: str,
    a_mn: bool,
    b_mn: bool,
) -> str:
    """The complete CUDA C++ source of one specialisation of a kernel file.

    Args:
        kernel: the file, whose text follows the shared headers.
        macros: its own macros.
        bn: columns of a tile.
        dtype: bfloat16 or float16.
        activation: its name.
        a_mn, b_mn: whether the M (N) dimension of the operand is the contiguous one.
    """
    all_macros = {
        **macros,
        "A_MN": int(a_mn),
        "B_MN": int(b_mn),
        "BN": bn,
        "IS_BF16": int(dtype == torch.bfloat16),
        **cuda_macros("fast", activation),
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in all_macros.items())
    texts = [path.read_text() for path in (*_HEADERS, kernel)]
    return defines + wgmma_source(bn, dtype, a_mn, b_mn) + "".join(texts)


def operand_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, int] | None:
    """(rows are the contiguous dimension, leading stride) as TMA can read it, or None."""
    (rows, cols), (row_stride, col_stride) = shape, strides
    if (col_stride == 1 or cols == 1) and (
        rows == 1 or (row_stride % 8 == 0 and row_stride >= cols)
    ):
        return False, row_stride if rows > 1 else -(-cols // 8) * 8
    if (row_stride == 1 or rows == 1) and (
        cols == 1 or (col_stride % 8 == 0 and col_stride >= rows)
    ):
        return True, col_stride if cols > 1 else -(-rows // 8) * 8
    return None


def wgmma_source(n: int, dtype: torch.dtype, a_mn: bool, b_mn: bool, name: str = "wgmma") -> str:
    """wgmma(acc, desc_a, desc_b): acc (64, n) += A (64, 16) B (n, 16)ᵀ; wgmma_first: acc = A Bᵀ."""
    count = n // 2
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    registers = ", ".join(f"%{i}" for i in range(count))

    def function(name: str, constraint: str, accumulate: int) -> str:
        outputs = ", ".join(f'"{constraint}f"(d[{i}])' for i in range(count))
        return (
            f"__device__ __forceinline__ void {name}(float (&d)[{count}], unsigned long long a,\n"
            "    unsigned long long b) {\n"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {accumulate}, 0;\\n"\n'
            f'    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{registers}}}, "\n'
            f'    "%{count}, %{count + 1}, p, 1, 1, {int(a_mn)}, {int(b_mn)};\\n}}"\n'
            f'    : {outputs} : "l"(a), "l"(b));\n}}\n'
        )

    return function(name, "+", 1) + function(f"{name}_first", "=", 0)


class EarlyLaunch(driver.Launch):
    """A launch that may set up while the kernel before it on the stream is ending.

    The kernel waits for that one to be done before it touches memory (griddepcontrol.wait).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begin_early()
