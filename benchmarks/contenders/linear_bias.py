"""What the bias of ``nn.Linear`` costs: the same product with it, without it, and added after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer
from benchmarks.harness.work import AnyWork, Unit
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES


@dataclass(frozen=True)
class BiasWork(AnyWork):
    """x, weight and bias of one call; the caches stay warm.

    Attributes:
        case: what is measured; its option ``x`` is ``rows`` for x (M, K), ``batch`` for
            (2, M/2, K) and ``batch_strided`` for the same transposed in memory.
        x, weight, bias: weight (N, K), bias (N,).
        stacks: one entry, so that nothing rotates.
        cold: False.
    """

    case: Case
    x: Tensor
    weight: Tensor
    bias: Tensor
    stacks: tuple[None, ...] = (None,)
    cold: bool = False

    def with_bias(self) -> Unit:
        """``F.linear`` as nn.Linear calls it."""
        return lambda _: (F.linear(self.x, self.weight, self.bias),)

    def without_bias(self) -> Unit:
        """``F.linear`` without a bias."""
        return lambda _: (F.linear(self.x, self.weight),)

    def added(self) -> Unit:
        """A product, then an addition."""
        return lambda _: (torch.matmul(self.x, self.weight.t()) + self.bias,)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x Wᵀ + b in ``dtype``."""
        return (F.linear(self.x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)),)

    def product(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x Wᵀ in ``dtype``."""
        return (F.linear(self.x.to(dtype), self.weight.to(dtype)),)

    def cost(self) -> Cost:
        """The product; x, weight, bias and y moved once."""
        m, n = self.case.dim("M"), self.case.dim("N")
        numbers = self.x.numel() + self.weight.numel() + self.bias.numel() + m * n
        return Cost(2.0 * m * self.weight.numel(), self.x.element_size() * numbers)

    def outer(self) -> dict[str, Tensor]:
        """x, weight and bias."""
        return {"x": self.x, "weight": self.weight, "bias": self.bias}


def make_work(case: Case, device: torch.device) -> BiasWork:
    """Draw the tensors of a case."""
    m, k, n = (case.dim(name) for name in ("M", "K", "N"))
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return values.to(FLOAT_DTYPES[case.dtype])

    layout = case.option("x")
    if layout == "rows":
        x = draw(m, k)
    elif layout == "batch":
        x = draw(2, m // 2, k)
    else:
        x = draw(m // 2, 2, k).transpose(0, 1)
    return BiasWork(case, x, draw(n, k) * k**-0.5, draw(n))


def peers(case: Case) -> tuple[Peer, ...]:
    """Linear, Linear without its bias, and a product followed by an addition."""
    return (
        Peer("linear", BiasWork.with_bias),
        Peer("linear_no_bias", BiasWork.without_bias, reference=BiasWork.product),
        Peer("matmul_add", BiasWork.added),
    )
