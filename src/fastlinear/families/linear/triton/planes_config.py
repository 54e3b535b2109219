"""How ``triton_planes`` shares out a product. Touches no device and imports no Triton."""

from __future__ import annotations

from functools import lru_cache

ROWS, COLS, DEPTH = 128, 64, 64
"""Of a tile, and of a step along the depth. Larger tiles spill on sm_80."""
_MOST_SLICES, _LEAST_STEPS = 16, 4


@lru_cache(maxsize=1 << 12)
def slices_of(rows: int, depth: int, cols: int, units: int) -> int:
    """Of the depth, so that the last wave of tiles is not much shorter than the others."""
    tiles, steps = -(-rows // ROWS) * -(-cols // COLS), -(-depth // DEPTH)

    def waves(slices: int) -> float:
        return -(-tiles * slices // units) * (-(-steps // slices) + _LEAST_STEPS)

    most = max(1, min(_MOST_SLICES, steps // _LEAST_STEPS))
    best = min(range(1, most + 1), key=waves)
    return -(-steps // -(-steps // best))  # none is empty
