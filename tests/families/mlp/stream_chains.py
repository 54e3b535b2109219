"""Widths of chains whose weights are streamed over all multiprocessors."""

from __future__ import annotations

import torch

BF16, F16 = torch.bfloat16, torch.float16

EVEN = [
    (768,) * 4,
    (896,) * 3,
    (1024,) * 4,
    (1152,) * 4,
    (1280,) * 3,
    (1536,) * 4,
    (2048,) * 5,
    (3072,) * 3,
    (4096,) * 3,
]
UNEVEN = [
    (784, 2048, 2048, 10),
    (1000, 1032, 8, 2056, 37),
    (4096, 1024, 4096),
    (1032, 1032, 1032),
    (72, 5000, 16, 1536, 1),
    (2048, 6144, 2048),
]
"""Inputs that are no whole tiles, layers of which clusters have no columns, odd last widths."""
