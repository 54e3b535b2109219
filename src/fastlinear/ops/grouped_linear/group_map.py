"""The copy engine's view of groups: boxes that end where a group's features and tokens end."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.grouped_linear.strips_tiles import ordinal

COLUMNS = 64
"""Of a box: 128 bytes, as the multiplier's swizzle has it."""
TOKENS = 64
"""Of a tile."""


class GroupMap(driver.TensorMap):
    """A TMA descriptor of a 16-bit (M, G, features) tensor.

    Boxes are 128-byte swizzled, a row of features behind the other. Reads beyond the group's
    features or the last token give zeros, writes there are dropped.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``.
        shape: (M, G, features), features a multiple of 8.
        row_stride: elements between tokens, a multiple of 8.
        box: tokens, groups and features of a box; 64 features at most.
        address: first element, 16-byte aligned.
        device: ordinal of the device the tensor is on.
        group_stride: elements between groups, a multiple of 8; None: they lie side by side.
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, int, int],
        row_stride: int,
        box: tuple[int, int, int],
        address: int,
        device: int,
        group_stride: int | None = None,
    ) -> None:
        m, groups, features = shape
        self._reserve(address, device)
        self._encode(
            driver._TENSOR_MAP_TYPE[dtype],
            (features, groups, m),
            ((features if group_stride is None else group_stride) * 2, row_stride * 2),
            box[::-1],
            driver._SWIZZLE_128B,
            driver._L2_PROMOTION_256B,
        )


def padded(features: int, step: int = COLUMNS) -> int:
    """Features in whole boxes."""
    return -(-features // step) * step


def boxes_of(t: Tensor, features: int, order: str, tokens: int, dense: bool = False) -> GroupMap:
    """Boxes of ``tokens`` x ``COLUMNS`` of a tensor like t (1, M, G, features), tokens or groups
    first, which has so many features a group; with ``dense`` of a dense one."""
    _, m, groups, _ = t.shape
    if order == "groups":
        row, apart = features, m * features
    else:
        row, apart = groups * features if dense or m == 1 else t.stride(1), features
    shape, box = (m, groups, features), (tokens, 1, COLUMNS)
    return GroupMap(DTYPE_NAMES[t.dtype], shape, row, box, t.data_ptr(), ordinal(t), apart)


def weight_boxes(weight: Tensor, rows: int) -> GroupMap:
    """Boxes of so many outputs x ``COLUMNS`` of a weight (G, N, K), dense."""
    groups, n, k = weight.shape
    box, place = (1, rows, COLUMNS), (weight.data_ptr(), ordinal(weight))
    return GroupMap(DTYPE_NAMES[weight.dtype], (groups, n, k), n * k, box, *place)
