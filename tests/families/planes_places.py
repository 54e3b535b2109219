"""Where tests of float32 by planes run: on a CPU, where launches are emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastlinear.families.linear.cuda import planes_product, planes_split
from tests.families.hopper_only import hopper_tests
from tests.kernels.emulation import emulate

PLACES = ["cpu", pytest.param("cuda", marks=hopper_tests)]


@contextmanager
def placed(where: str) -> Iterator[None]:
    """New tensors lie there."""
    with torch.device(where), pytest.MonkeyPatch.context() as patch:
        if where == "cpu":
            emulate(patch, planes_product)
            planes_product._units.cache_clear()
        yield
    if where == "cpu":
        planes_split.plans.clear()
        planes_product.plans.clear()
        planes_product._units.cache_clear()


def values(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers there, the same in each place."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())
