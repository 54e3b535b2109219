"""Models whose layers could be one, for the tests of the rewriter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl

FAST = {"cpp": 50.0, "onednn": 50.0, "pieces": 50.0, "after": 50.0}
"""Times of the contenders of a clock on which one call is faster."""


class Loop(nn.Module):
    """The document's: a loop over chunks."""

    def __init__(self, groups: int, k: int) -> None:
        super().__init__()
        self.projs = nn.ModuleList(nn.Linear(k, k) for _ in range(groups))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.chunk(x, len(self.projs), dim=-1)
        return torch.cat([proj(part) for proj, part in zip(self.projs, parts, strict=True)], -1)


class SlowGroups(nn.Module):
    """The document's own class, channels first, with what its text leaves out. Before Python 3.12
    its comprehension reads ``self`` and ``parts`` as cells."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        assert channels % groups == 0
        self.groups = groups
        self.projs = nn.ModuleList()
        for _ in range(groups):
            self.projs.append(nn.Linear(channels // groups, channels // groups))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.chunk(x.transpose(-1, -2), self.groups, dim=-1)
        return torch.cat([self.projs[n](parts[n]) for n in range(self.groups)], dim=-1).transpose(
            -1, -2
        )


class Stack(nn.Module):
    """A loop over the last dimension but one, with an activation; its names say nothing."""

    def __init__(self, groups: int = 3, k: int = 8, n: int = 6, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(k, n, bias) for _ in range(groups))
        self.f = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for i, layer in enumerate(self.a):
            found.append(self.f(layer(x[..., i, :])))
        return torch.stack(found, -2)


class Convolutions(nn.Module):
    """Grouped convolutions over one position, of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(12, 18, 1, groups=3)
        self.two = nn.Conv2d(12, 24, 1, groups=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, 12, 5) -> (B, 18 + 24, 5)
        return torch.cat([self.one(x), self.two(x.unsqueeze(-1)).squeeze(-1)], 1)


class Multichannel(nn.Module):
    """``bmm`` with a weight per group, (G, M, K)."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        shape = (6, 5, 7) if turned else (6, 7, 5)  # G, N, K
        self.kernel = nn.Parameter(torch.randn(shape))
        self.shift = nn.Parameter(torch.randn(6, 1, 7))
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        w = self.kernel if self.turned else self.kernel.transpose(1, 2)
        return F.gelu(torch.bmm(x, w) + self.shift)


class ByEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:  # (B, G, K)
        return torch.einsum("bgk,gnk->bgn", x, self.w)


class ByVmap(nn.Module):
    """One linear layer, vectorized over the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:  # (G, M, K)
        return torch.vmap(F.linear)(x, self.w, self.b)


class Attention(nn.Module):
    """Queries, keys and values of one input; keys and values are narrower."""

    def __init__(self, k: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_out = nn.Linear(k, k), nn.Linear(k, k)
        self.to_k, self.to_v = nn.Linear(k, k // 2), nn.Linear(k, k // 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.to_q(x).view(b, t, 2 * self.heads, -1).transpose(1, 2)
        k = self.to_k(x).view(b, t, self.heads, -1).transpose(1, 2)
        v = self.to_v(x).view(b, t, self.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
        return self.to_out(y.transpose(1, 2).flatten(2))


class Inside(nn.Module):
    """A loop over chunks amid other work, with layers of its own before and after."""

    def __init__(self, groups: int = 4, k: int = 8, n: int = 5) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, groups * k), nn.Linear(groups * n, 3)
        self.projs = nn.ModuleList(nn.Linear(k, n) for _ in range(groups))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).chunk(len(self.projs), -1)
        found = [proj(part) for proj, part in zip(self.projs, parts, strict=False)]
        return self.out(F.gelu(torch.cat(found, -1)))


class ByIndex(Inside):
    """The same by ``split`` and indices, the last part first, and without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.projs = nn.ModuleList(nn.Linear(8, 5, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.into(x), 8, dim=-1)
        y = self.projs[3](parts[3])
        for i in (2, 1, 0):
            y = torch.cat([y, F.relu_(self.projs[i](parts[i]))], -1)
        return self.out(y)


class Heads(nn.Module):
    """Heads of one input, every second one with an activation; an in-place one among them."""

    def __init__(self, heads: int = 4, k: int = 8, n: int = 3) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for i, head in enumerate(self.heads):
            y = head(x)
            found.append(F.relu(y, inplace=True) if i % 2 else y)
        return torch.cat(found, -1)


def optimized(model: nn.Module, x: Any, mode: str = "inference", **how: Any) -> Any:
    """``optimize_`` with settings that take little time."""
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, **how)
    return fl.optimize_(model, x, config=config)


def same_results(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Assert that outputs and all gradients agree."""
    given = [x.clone().requires_grad_() for _ in range(2)]
    ys = ours(given[0]), theirs(given[1])
    torch.testing.assert_close(*ys, rtol=1e-4, atol=1e-4)
    for model in (ours, theirs):
        model.zero_grad()
    for y in ys:
        y.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-3, atol=1e-3)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
