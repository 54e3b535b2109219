"""Layout 1 of backend ``whole_cuda``: clusters carry rows of x through all layers.

``whole.cu`` holds the kernel. Hidden activations go from block to block of a cluster through shared
memory and never leave the chip; each cluster reads all weights.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.mlp.cuda.config import Config, Widths, input_units
from fastlinear.families.mlp.cuda.plan import Places, WholePlan
from fastlinear.native import cuda_driver as driver

__all__ = ["ClustersPlan", "save_mode", "source"]

KERNEL = "whole_mlp"
MAX_LAYERS = 32
_NAMES = ("device.cu", "layout.cu", "products.cu", "whole.cu")
SOURCES = [CUDA_HEADER, *(Path(__file__).with_name(name) for name in _NAMES)]
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def source(
    config: Config,
    widths: Widths,
    dtype: torch.dtype,
    activation: str,
    final_activation: str,
    save: int = 0,
    vec: int = 16,
) -> str:
    """The complete CUDA C++ source of one specialisation; only ``widths``' padding matters.

    Args:
        save: 0 nothing, else as ``save_mode`` gives it.
        vec: bytes at which every weight row is aligned.
    """
    macros = {
        "DTYPE": _DTYPES[dtype],
        "CLUSTER": config.cluster,
        "NB": config.rows // 8,
        "WN": config.groups,
        "KS": config.split_k,
        "TW": config.tiles,
        "UNROLL": config.unroll,
        "DEPTH": config.depth,
        "VEC": vec,
        "EXACT": int(vec == 16 and config.exact(widths, dtype.itemsize)),
        "WIDTH": widths[0] if len(set(widths)) == 1 else 0,
        "UNITS": input_units(widths, dtype.itemsize),
        "SAVE": save,
        "MAX_LAYERS": MAX_LAYERS,
        "SIMT": int(config.simt),
        "DIRECT": int(config.direct),
        **cuda_macros("fast" if dtype.itemsize == 2 else "product", activation),
        "FINAL": CODES[final_activation],
    }
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + "".join(
        file.read_text() for file in SOURCES
    )


def save_mode(activation: str, final_activation: str, layers: int) -> int:
    """SAVE of ``whole.cu``: which of pre-activation and output each layer keeps."""
    hidden_pre = layers > 1 and activation_of(activation).saved == "pre"
    final_pre = activation_of(final_activation).saved == "pre"
    if hidden_pre:
        return 1 if final_pre else 4
    return 3 if final_pre else 2


# x, y, weight[], bias[], saved[] | x_stride | rows, layers, width[], padding
_POINTERS = 2 + 3 * MAX_LAYERS
_PARAM_BYTES = (8 * (_POINTERS + 1) + 4 * (2 + MAX_LAYERS + 1) + 7) // 8 * 8
_Params = ctypes.c_char * _PARAM_BYTES


class ClustersPlan(WholePlan):
    """One prepared launch: fixed shapes, any addresses. Not safe to share without a lock.

    Args:
        kernel: in this configuration.
        config: how the work is shared out.
        widths: n_0 … n_L.
        rows: M.
        save: SAVE of ``whole.cu``; 0 nothing.
    """

    def __init__(
        self, kernel: driver.Kernel, config: Config, widths: Widths, rows: int, save: int
    ) -> None:
        layers = len(widths) - 1
        self._params = _Params()
        struct.pack_into(
            f"<{layers + 3}i", self._params, 8 * (_POINTERS + 1), rows, layers, *widths
        )
        self._addresses = struct.Struct(f"<{2 + layers}Q")
        self._pointers = struct.Struct(f"<{layers}Q")
        self._stride = struct.Struct("<q")
        self.launch = driver.Launch(
            kernel,
            32 * config.warps,
            config.cluster,
            [self._params],  # type: ignore[list-item]
        )
        self.launch.set_grid(-(-rows // config.rows) * config.cluster)
        self.runs = self.launch.max_clusters() >= 1
        self.places = Places(0, 8, 16, 8 * (2 + MAX_LAYERS), 8 * (2 + 2 * MAX_LAYERS), shared=False)
        self.out_shape = (rows, widths[-1])
        self.saved_shapes = [(rows, n) for n in widths[1:]] if save else []
        self.last_saves_pre = save in (1, 3)

    def fill(
        self,
        x: Tensor,
        y: Tensor,
        saved: Sequence[Tensor],
        weights: Sequence[int],
        biases: Sequence[int],
        stream: int,
    ) -> None:
        """As ``WholePlan.fill``."""
        params = self._params
        if saved:
            self._pointers.pack_into(
                params, 8 * (2 + 2 * MAX_LAYERS), *[t.data_ptr() for t in saved]
            )
        self._addresses.pack_into(params, 0, x.data_ptr(), y.data_ptr(), *weights)
        self._pointers.pack_into(params, 8 * (2 + MAX_LAYERS), *biases)
        self._stride.pack_into(params, 8 * _POINTERS, x.stride(0))
