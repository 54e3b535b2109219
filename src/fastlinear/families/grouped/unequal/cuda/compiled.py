"""The kernels of layers of unequal sizes as text, and loaded: ``half.cu`` for 16-bit dtypes,
``single.cu`` and ``adds.cu`` for float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from fastlinear.activations.reference import cuda_macros
from fastlinear.families.grouped.unequal.cuda.config import (
    ADD,
    EXTRAS,
    FORWARD,
    SINGLE,
    SMALL,
    Extras,
    SingleTiles,
    Tiles,
)
from fastlinear.native import cuda_driver as driver

MAX_GROUPS = 240
"""Groups of one launch; more take several."""
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_HEADERS = ("instructions.h", "../../../../activations/cuda.h", "groups.h", "shares.h")
_KERNEL = "unequal_linear"


def source(
    dtype: torch.dtype,
    mode: int,
    activation: str,
    save_pre: bool,
    tiles: Tiles = SMALL,
    places: int = MAX_GROUPS,
    pitched: bool = False,
    extras: Extras = (),
    *,
    headers: Sequence[str] = _HEADERS,
) -> str:
    """The complete CUDA C++ source of one specialisation; ``headers`` lie beside this file."""
    wide = dtype is torch.float32
    if wide and not isinstance(tiles, SingleTiles):
        tiles = SINGLE
    macros = {
        "MODE": mode,
        "KIND": KINDS[dtype],
        **cuda_macros("quotient", activation),
        "SAVE_PRE": int(save_pre),
        "PITCHED": int(pitched),
        **{name: int(name in extras) for name in EXTRAS},
        "GROUPS": places,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.cols,
        "WARPS_M": tiles.warps[0],
        "WARPS_N": tiles.warps[1],
        "STAGES": tiles.stages,
        "BLOCKS": tiles.blocks,
        "WARPS_K": tiles.depth_warps if isinstance(tiles, SingleTiles) else 1,
    }
    if isinstance(tiles, SingleTiles):
        macros["WORDS"] = tiles.words
    main = "half.cu" if not wide else "adds.cu" if mode == ADD else "single.cu"
    here = Path(__file__).parent
    files = (here / name for name in (*headers, main))
    text = "".join(path.read_text() for path in files)
    return "".join(f"#define {name} {v}\n" for name, v in macros.items()) + text


@cache
def kernel(
    dtype: torch.dtype,
    mode: int,
    activation: str,
    save_pre: bool,
    tiles: Tiles,
    places: int,
    pitched: bool,
    extras: Extras,
    device: int,
) -> driver.Kernel:
    """The same, compiled and loaded."""
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    text = source(dtype, mode, activation, save_pre, tiles, places, pitched, extras)
    cubin = driver.compile_cubin(text, "unequal_linear.cu", arch)
    derived = mode != FORWARD and activation != "none"
    shared = 0 if mode == ADD else tiles.shared_bytes(derived, "ODD" in extras)
    return driver.Kernel(cubin, _KERNEL, shared, device)
