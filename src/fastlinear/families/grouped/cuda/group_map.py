"""How kernels for wide groups see tensors of tokens: as the copy engine's boxes, which end where a
group's features and tokens end, or, where rows do not begin at 16 bytes, by strides."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.cuda import packed_groups_tiles
from fastlinear.families.grouped.cuda.packed_groups_tiles import has_dense_rows, ordinal
from fastlinear.families.grouped.problem import tokens_of
from fastlinear.native import cuda_driver as driver

COLUMNS = 64
"""Of a box: 128 bytes, as the multiplier's swizzle has it."""
TOKENS = 64
"""Of a tile."""
_STEP = 8  # numbers of 16 bytes
_MOST_APART = 1 << 28  # numbers from a row to the next, of which kernels count bytes
_MOST_NUMBERS = 1 << 31  # of a group


class GroupMap(driver.TensorMap):
    """A TMA descriptor of a 16-bit (M, G, features) tensor; of one channels first its features take
    the place of M, its tokens that of features.

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


def by_words(features: int, order: str) -> bool:
    """Whether rows of so many features a group have no boxes."""
    return features % _STEP > 0 and order != "channels"


def boxes_of(
    t: Tensor, features: int, order: str, rows: int, dense: bool = False
) -> driver.TensorMap:
    """Boxes of a tensor like t (B, L, G, _) with so many features a group, or with ``dense`` of a
    dense one; none where it comes ``by_words``.

    Tokens or groups first, B is 1, and a box is ``rows`` tokens of ``COLUMNS`` features. Channels
    first, it is ``rows`` features of ``TOKENS`` tokens of a group of one of the B.
    """
    _, m, groups, _ = t.shape
    if by_words(features, order):
        return driver.NoTensorMap()
    if order == "channels":
        row, apart = (m, m * features) if dense else (t.stride(3), _planes_apart(t))
        shape, box = (features, t.shape[0] * groups, m), (rows, 1, TOKENS)
    else:
        row, apart = groups * features if dense or m == 1 else t.stride(1), features
        if order == "groups":
            row, apart = features, m * features
        shape, box = (m, groups, features), (rows, 1, COLUMNS)
    return GroupMap(DTYPE_NAMES[t.dtype], shape, row, box, t.data_ptr(), ordinal(t), apart)


def strides_of(t: Tensor, features: int, order: str, dense: bool = False) -> tuple[int, int]:
    """Numbers from a token to the next and from a group to the next of t (B, L, G, features), or
    with ``dense`` of a dense tensor of so many features; zeros where it does not come
    ``by_words``."""
    _, m, groups, _ = t.shape
    if not by_words(features, order):
        return 0, 0
    if not dense:
        return (t.stride(1) if m > 1 else 0), (t.stride(2) if groups > 1 else 0)
    return (groups * features, features) if order == "tokens" else (features, m * features)


def reason_not(p: Problem) -> str | None:
    """Why a Problem's tensors cannot be seen like this, or None."""
    reason = packed_groups_tiles.reason_not(p, layouts.ORDERS)
    if reason is not None:
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    length = tokens_of(p)[1]
    if p.option("order") == "channels" and length % 8:
        return f"serves sequences of channels of multiples of 8 tokens, not {length}"
    return None


def is_seen(t: Tensor, order: str) -> bool:
    """Whether t can be read; as boxes also a dense tensor of its sizes written, by words see
    ``has_results``.

    As boxes: 16 bytes everywhere; tokens or groups first see ``has_dense_rows``, channels first:
    tokens side by side, all groups of all sequences at one distance. By words: any strides, 4
    bytes everywhere, 8 where features are a multiple of 4.
    """
    if by_words(t.shape[3], order):
        numbers = 4 if t.shape[3] % 4 == 0 else 2
        row, apart = strides_of(t, t.shape[3], order)
        return (
            t.shape[0] == 1
            and t.stride(3) == 1
            and t.data_ptr() % (2 * numbers) == 0
            and row % numbers == 0
            and apart % numbers == 0
            and 0 <= row < _MOST_APART
            and 0 <= apart < _MOST_NUMBERS
        )
    if order != "channels":
        return t.shape[0] == 1 and has_dense_rows(t, order)
    batch, m, groups, features = t.shape
    if t.stride(1) != 1 or m % 8 or t.data_ptr() % 16:
        return False
    if batch > 1 and groups > 1 and t.stride(0) != groups * t.stride(2):
        return False
    row, apart = t.stride(3), _planes_apart(t)
    return row % 8 == 0 and row >= m and apart % 8 == 0 and apart >= features * row


def _planes_apart(t: Tensor) -> int:
    """Elements from a group of a sequence of t (B, L, G, features) to the next, channels first."""
    batch, _, groups, features = t.shape
    if groups > 1:
        return t.stride(2)
    return t.stride(0) if batch > 1 else features * t.stride(3)


def tiles_of(t: Tensor) -> tuple[int, int]:
    """Tiles of ``TOKENS`` tokens of t (B, L, G, _), of all and of one of the B."""
    each = -(-t.shape[1] // TOKENS)
    return t.shape[0] * each, each


def has_results(m: int, features: int, order: str) -> bool:
    """Whether a dense tensor of so many tokens and features a group can be written."""
    return not by_words(features, order) or m * features < _MOST_NUMBERS


def weight_boxes(weight: Tensor, rows: int) -> driver.TensorMap:
    """Boxes of so many outputs x ``COLUMNS`` of a weight (G, N, K), dense; none where its rows do
    not begin at 16 bytes."""
    groups, n, k = weight.shape
    if k % _STEP:
        return driver.NoTensorMap()
    box, place = (1, rows, COLUMNS), (weight.data_ptr(), ordinal(weight))
    return GroupMap(DTYPE_NAMES[weight.dtype], (groups, n, k), n * k, box, *place)
