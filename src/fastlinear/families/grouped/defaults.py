"""Which backend is the default where no measurement covers a Problem: what was measured on an H200
and an H100, as rules of sizes."""

from __future__ import annotations

import torch

from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cuda import (
    group_map,
    packed_groups_backward,
    packed_groups_backward_float32,
    packed_groups_config,
    packed_groups_tiles,
    weight_stationary_config,
    wide_backward_config,
)
from fastlinear.families.grouped.problem import STEP, tokens_of
from fastlinear.families.grouped.sign_mask import ACTIVATIONS, has_place
from fastlinear.families.grouped.triton import config as triton_config
from fastlinear.fastpath import autograd_node

_TOKENS_ONE_BY_ONE = 768
_FEW_TOKENS = 1 << 12  # of all groups: no more than that is too few for kernels that keep weights
_LEAST_SEQUENCE = 48  # tokens of a sequence of channels, for tiles of 64
_LEAST_BY_WORDS = 128  # tokens of a group whose rows a kernel's warps bring in
_MOST_BY_WORDS = 300  # features, of those measured
_LEAST_STRIP = 192  # bytes of its width from which `packed_groups` is taken
_HOPPER_UNITS = 132  # multiprocessors
_HOST_BOUND = 1 << 25  # numbers of x and y below which a GPU waits for a training call's Python


def prefer(p: Problem) -> tuple[str, ...]:
    """Backends of a Problem's piece, the fastest first."""
    if p.piece == STEP:
        # without nodes in C++ the formula is Python's, which asks more of the host: 430 to 620 us
        # a call, PyTorch's own 270 to 440
        numbers = p.dim("M") * p.dim("G") * (p.dim("K") + p.dim("N"))
        slow_host = p.device == "cuda" and not p.captured and autograd_node.reason_not() is not None
        own_autograd = slow_host and numbers < _HOST_BOUND
        return ("eager", "pieces") if own_autograd else ("pieces", "eager")
    if p.device != "cuda":
        return ("eager",)
    # measured on an H200 and an H100, over the sizes in README.md
    if p.piece == "backward":
        return _prefer_backward(p)
    if _worth_words(p):
        return ("weight_stationary", "triton", "eager")
    if _worth_packing(p) or _keeps_sign_mask(p):
        return ("packed_groups", "triton", "eager")
    widest, least = max(p.dim("K"), p.dim("N")), min(p.dim("K"), p.dim("N"))
    if widest <= 128 and (least <= 112 or p.dtype == "float32"):
        return ("triton", "eager")
    config = weight_stationary_config.stationary_config(p.dim("K"), p.dim("N"))
    if config is not None and p.dim("M") * p.dim("G") <= _FEW_TOKENS:
        return ("triton", "eager")
    whole = not (p.dim("K") % 8 or p.dim("N") % 8)
    first = (
        ("weight_stationary",) if config is not None and whole and _worth_keeping(p, config) else ()
    )
    if config is not None and _worth_wide_packing(p, config):
        first = ("packed_groups", *first)
    return (*first, *(("wide",) if _fills_wide(p) else ()), "triton", "eager")


def _prefer_backward(p: Problem) -> tuple[str, ...]:
    """``prefer`` for a backward on a GPU."""
    k, n, m = p.dim("K"), p.dim("N"), p.dim("M")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    one_pass = max(k, n) <= (128 if hopper else 32)
    copies = tokens_of(p)[0] > 1  # PyTorch's batched products take no sequences of channels
    if p.dtype == "float32":
        # PyTorch's batched product adds up a group's tokens one by one: of 1024 and more dW is less
        # exact than a loop's by more than the rule allows, whatever the size of the groups
        ours = m >= 512 if copies else max(k, n) <= 32 or m >= _TOKENS_ONE_BY_ONE
        first = ("packed_groups",) if hopper and _fills_packed_float32(p) else ()
        return (*first, *(("triton", "eager") if ours else ("eager",)))
    if one_pass and _worth_packing_backward(p):
        return ("packed_groups", "triton", "eager")
    if one_pass:
        return ("triton", "eager")
    if k % 8 or n % 8:
        # PyTorch's batched products lose where rows do not begin at 16 bytes
        ours = hopper and _worth_words_backward(p)
        return ("wide", "triton", "eager") if ours else ("triton", "eager")
    if not wide_backward_config.serves(k, n):
        return ("triton", "eager") if copies else ("eager",)
    if copies and (not hopper or not _fills_boxes(p)):
        return ("triton", "eager")
    # of few tokens a group what is read and written is weights, and padding what is multiplied
    filled = 4 * k * n >= 3 * group_map.padded(k, 128) * group_map.padded(n)
    few = m * p.dim("G") < _FEW_TOKENS or m < (group_map.TOKENS if filled else 128)
    if not hopper or few or not _fills_boxes(p):
        return ("triton", "eager") if copies else ("eager",)
    by_triton, by_pytorch = _triton_derives_sooner(p), _pytorch_derives_sooner(p) and not copies
    return ("eager",) if by_pytorch else ("triton", "eager") if by_triton else ("wide", "eager")


def _fills_boxes(p: Problem) -> bool:
    """Whether sequences of channels are so long that the tiles of ``weight_stationary`` and
    ``wide`` are not for the most part empty."""
    length = tokens_of(p)[1]
    return p.option("order") != "channels" or (length % 8 == 0 and length >= _LEAST_SEQUENCE)


def _triton_derives_sooner(p: Problem) -> bool:
    """Whether Triton's backward of groups of 136 to 256 features takes less time than ``wide``:
    without an activation, where it has no launch for the derivative, of few tokens a group.

    H100, 21 sizes of 144 to 256 features in each order.
    """
    m, groups = p.dim("M"), p.dim("G")
    if p.option("activation") == "none":
        large = min(p.dim("K"), p.dim("N")) > 192
        return m <= (128 if not large else 1024 if groups >= 64 else 256)
    return p.option("order") == "channels" and m * groups < 3 << 12


def _pytorch_derives_sooner(p: Problem) -> bool:
    """Whether PyTorch's batched products, which channels first need no turning, are the fastest:
    few groups, few tokens."""
    tokens, groups = p.dim("M") * p.dim("G"), p.dim("G")
    if p.option("order") != "channels":
        return False
    if p.option("activation") == "none":
        return tokens < 1 << 15 and groups <= 32
    return tokens < 3 << 12 and groups <= 16


def _worth_packing(p: Problem) -> bool:
    """Whether ``packed_groups`` is the faster forward of many tokens: Triton's tiles are powers of
    two, and its loads wait for each other where rows do not begin at 16 bytes."""
    k, n, tokens = p.dim("K"), p.dim("N"), p.dim("M") * p.dim("G")
    step = 16 if p.dtype == "float32" else 8
    odd = bool(k % step or n % step)
    if p.dtype == "float32":
        filled = 5 * k * n >= 3 * triton_config.padded(k) * triton_config.padded(n)
        return tokens >= 1 << 15 and k >= 48 and (odd or not filled)
    if odd or max(k, n) > 128:
        return odd and tokens >= 3 << 12
    padded = triton_config.padded(k) * triton_config.padded(n) > k * n
    worth = padded or max(k, n) < 32
    return tokens >= _least_tokens(k, n, 3 << 13, 3 << 14) and worth and _fills_packed(p)


def _worth_words(p: Problem) -> bool:
    """Whether ``weight_stationary`` is the faster forward of groups whose rows begin at less than
    16 bytes, of which one side has more than 128 features.

    H100, while developing: 32 cases of 66 to 250 features, of which it takes 8 to 41% less time
    than ``triton``, and of 130 26 to 43% less than ``packed_groups``; of 300 features, too. Not of
    up to 4096 tokens of all groups or 64 of each.
    """
    k, n, m = p.dim("K"), p.dim("N"), p.dim("M")
    if p.dtype == "float32" or not (k % 8 or n % 8) or not 128 < max(k, n) <= _MOST_BY_WORDS:
        return False
    config = weight_stationary_config.stationary_config(k, n)
    if config is None or m < _LEAST_BY_WORDS or not _fills_boxes(p):
        return False
    if m * p.dim("G") <= _FEW_TOKENS:
        return False
    if p.option("order") == "channels":
        return k > 128
    keeps = p.needs_grad and p.option("activation") in ACTIVATIONS  # signs, for `wide`
    if min(k, n) > 128 or (keeps and n > 192 and p.option("order") == "groups"):
        return True
    side = packed_groups_tiles.side_by_side(p.option("order"), m, p.dim("G"))
    return k > 128 and packed_groups_config.packed_config(side, k, n, False) is None


def _worth_words_backward(p: Problem) -> bool:
    """Whether ``wide`` is the faster backward of such groups.

    H100, while developing. With signs 3 to 48% of Triton's time less, in 52 cases of 66 to 250
    features; where y or pre-activations are read, up to 7% more in two of these (250 features,
    channels first, 16384 tokens of all groups). Without an activation, where Triton derives
    nothing, 38% less to 5% more in the cases that the last line leaves.
    """
    k, n, m = p.dim("K"), p.dim("N"), p.dim("M")
    if not wide_backward_config.serves(k, n) or min(k, n) < 64:
        return False
    if m < _LEAST_BY_WORDS or not _fills_boxes(p):
        return False
    if p.option("activation") != "none":
        return True
    return (m > 1024 or min(k, n) <= 192) and not (k <= 128 and n > 192)


def _worth_wide_packing(p: Problem, config: weight_stationary_config.StationaryConfig) -> bool:
    """Whether ``packed_groups`` is the faster forward of what ``weight_stationary`` could hold:
    where that one's blocks do not divide evenly among groups, the more where rows do not begin at
    whole sectors.

    H100, 8 to 37% of its time less; 96 to 232 features.
    """
    k, n, m, groups = p.dim("K"), p.dim("N"), p.dim("M"), p.dim("G")
    parts = groups * -(-n // config.outputs)
    tiles = -(-m // group_map.TOKENS)
    evenly = weight_stationary_config.blocks_of(parts, tiles, _HOPPER_UNITS)[1] > 0
    most = 232 if k % 16 or n % 16 else 192 if p.option("order") == "tokens" else 0
    return not evenly and m * groups >= 3 << 13 and min(k, n) >= 96 and 128 < max(k, n) <= most


def _least_tokens(k: int, n: int, wide: int, narrow: int) -> int:
    """Of all groups, from which a kernel with shares of many blocks pays: more of groups of up to
    32 features."""
    return narrow if max(k, n) <= 32 else wide


def _worth_packing_backward(p: Problem) -> bool:
    """Whether ``packed_groups`` is the faster backward of 16-bit numbers of up to 128 features:
    where an activation gives ``triton`` a launch more sooner than where none does."""
    k, n, tokens = p.dim("K"), p.dim("N"), p.dim("M") * p.dim("G")
    activation = p.option("activation")
    if activation == "none":
        filled = min(k, n) >= 64 and triton_config.padded(k) * triton_config.padded(n) == k * n
        return tokens >= 1 << 17 and not filled and _fills_packed(p)
    least = (3 << 13, 3 << 15) if activation in ACTIVATIONS else (1 << 15, 3 << 14)
    return tokens >= _least_tokens(k, n, *least) and _fills_packed(p)


def _keeps_sign_mask(p: Problem) -> bool:
    """Whether a training call keeps a bit for each output, which costs its forward a twentieth and
    saves its backward a pass over the outputs."""
    if not p.needs_grad or p.dtype == "float32" or p.option("activation") not in ACTIVATIONS:
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    sizes = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    return _worth_packing_backward(p) and has_place(p.option("order"), *sizes)


def _fills_packed(p: Problem) -> bool:
    """Whether groups of 16-bit numbers lie side by side so that a strip of them is ``_LEAST_STRIP``
    bytes wide, or of as many groups as the kernels take."""
    side = packed_groups_tiles.side_by_side(p.option("order"), p.dim("M"), p.dim("G"))
    k, n = p.dim("K"), p.dim("N")
    if packed_groups_config.packed_config(side, k, n, True) is None:
        return False
    groups = packed_groups_config.widest(side, k, n)
    return 2 * groups * max(k, n) >= _LEAST_STRIP or groups == 8


def _fills_packed_float32(p: Problem) -> bool:
    """Whether the backward of float32 strips is served, with tiles for all teams of its blocks."""
    if packed_groups_backward.reason_not(p) is not None:
        return False
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    config = packed_groups_backward_float32.float32_backward_config(k, n)
    assert config is not None
    tiles = -(-m // packed_groups_tiles.ROWS)
    busy = tiles >= 2 * config.teams or groups <= _HOPPER_UNITS
    return busy and m * groups >= (_FEW_TOKENS << 2 if max(k, n) <= 32 else _FEW_TOKENS >> 3)


def _fills_wide(p: Problem) -> bool:
    """Whether the forward of ``wide`` has tiles of 128 tokens and outputs for most of a GPU."""
    tiles = p.dim("G") * -(-p.dim("M") // 128) * -(-p.dim("N") // 128)
    return p.option("order") == "tokens" and p.dim("K") > 128 and tiles >= 128


def _worth_keeping(p: Problem, config: weight_stationary_config.StationaryConfig) -> bool:
    """Whether most of what ``weight_stationary`` multiplies are numbers of the group, and x is read
    for more than a few outputs at a time."""
    k, n = p.dim("K"), p.dim("N")
    parts = -(-n // config.outputs)
    if parts > 1 and config.outputs <= group_map.COLUMNS:
        return False
    filled = 2 * k * n > group_map.padded(k) * config.outputs * parts
    return filled and p.dim("M") >= group_map.TOKENS and _fills_boxes(p)
