"""Models that loop over linears of any sizes, for the tests of the rewriter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.families.grouped.unequal.op import explain
from fastlinear.rewrite.rules.grouped.parallel_mlps import forward as parallel_mlps_forward

FAMILY = ("grouped_linear",)
SIZES = ((8, 6), (5, 7), (12, 3), (8, 6), (3, 9))


def _together(xs: list[torch.Tensor], weights: list[torch.Tensor]) -> bool:
    return explain(xs, weights).choices[0].backend.name == "together"


TOGETHER = _together([torch.ones(2, 8)] * 2, [torch.ones(8, 8)] * 2)
_HALF = [torch.ones(2, 8).bfloat16()] * 2, [torch.ones(8, 8).bfloat16()] * 2
HALF_TOGETHER = _together(*_HALF)


class Layers(nn.Module):
    def __init__(self, sizes: Any = SIZES, bias: Any = (True,)) -> None:
        super().__init__()
        biases = (*bias, *[bias[-1]] * len(sizes))
        self.layers = nn.ModuleList(
            nn.Linear(k, n, b) for (k, n), b in zip(sizes, biases, strict=False)
        )


class Listed(Layers):
    """Inputs that the caller lists, of sizes of their own."""

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


class Equal(Listed):
    """Linears of one size, each followed by an activation."""

    def __init__(self) -> None:
        super().__init__(((8, 6),) * 4)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [F.silu(layer(x)) for layer, x in zip(self.layers, xs, strict=True)]


class Named(nn.Module):
    """A dict of layers on a tuple; only some of them are followed by an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({f"f{i}": nn.Linear(k, 4) for i, (k, _) in enumerate(SIZES)})

    def forward(self, xs: tuple[Tensor, ...], scale: float = 2.0) -> list[Tensor]:
        ys = [self.of[f"f{i}"](x) for i, x in enumerate(xs)]
        return [torch.relu(ys[0]), *(y * scale for y in ys[1:])]


class Split(Layers):
    """Pieces of one tensor, their sizes asked of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([layer.in_features for layer in self.layers], -1)
        return torch.cat([layer(p) for layer, p in zip(self.layers, parts, strict=True)], -1)


class Sized(Layers):
    """Pieces whose sizes are kept in a list; biases here and there."""

    def __init__(self) -> None:
        super().__init__(bias=(True, False, True))
        self.sizes = [k for k, _ in SIZES]

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.sizes, dim=-1)
        return torch.cat([layer(p) for layer, p in zip(self.layers, parts, strict=True)], -1)


class Shared(Layers):
    """One input; biases here and there."""

    def __init__(self) -> None:
        super().__init__(tuple((8, n) for _, n in SIZES), (True, False))

    def forward(self, x: Tensor) -> Tensor:
        return self.all_of(torch.tanh(x))

    def all_of(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


class Indexed(Layers):
    """Inputs made between the calls, results written to."""

    def forward(self, x: Tensor) -> Tensor:
        y = None
        for i in range(len(SIZES)):
            k = SIZES[i][0]
            h = self.layers[i](torch.exp(x[:, i, :k])).mul_(2.0)
            y = F.relu_(h) if y is None else torch.cat([y, h], -1)
        return y


def own(rows: Any = (9,) * 5, sizes: Any = SIZES) -> list[Tensor]:
    return [torch.randn(m, k) for m, (k, _) in zip(rows, sizes, strict=False)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "listed": (Listed, lambda: (own(),), "inputs of their own"),
    "rows differ": (Listed, lambda: (own((9, 3, 1, 20, 4)),), "inputs of their own"),
    "equal": (Equal, lambda: (own((9, 3, 1, 20), ((8, 6),) * 4),), "inputs of their own"),
    "named": (Named, lambda: (tuple(own()),), "inputs of their own"),
    "split": (Split, lambda: (torch.randn(9, 36),), "parts of one tensor"),
    "sized": (Sized, lambda: (torch.randn(2, 5, 36),), "parts of one tensor"),
    "shared": (Shared, lambda: (torch.randn(9, 8),), "one input"),
    "indexed": (Indexed, lambda: (torch.randn(9, 5, 12),), "inputs of their own"),
}


def flat(y: Any) -> Tensor:
    return y.flatten() if isinstance(y, Tensor) else torch.cat([t.flatten() for t in y])


def loss_of(y: Any) -> Tensor:
    return flat(y).square().mean()


def given(x: Any) -> Any:
    """A copy whose tensors take gradients."""
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_()
    return type(x)(map(given, x))


def tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for v in x for t in tensors(v)]


def agree(ours: nn.Module, theirs: nn.Module, x: tuple[Any, ...]) -> None:
    """Outputs and all gradients are the same."""
    found = []
    for model in (ours, theirs):
        model.zero_grad()
        args = given(x)
        y = model(*args)
        loss_of(y).backward()
        found.append([flat(y).detach(), *(t.grad for t in tensors(args))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)


def calls_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of linears that rewritten forwards compute at once from here on."""
    seen: list[int] = []
    real = parallel_mlps_forward.layered

    def layered(xs: Any, *rest: Any) -> Any:
        found = real(xs, *rest)
        seen.append(len(xs))
        return found

    monkeypatch.setattr(parallel_mlps_forward, "layered", layered)
    return seen


def kept(result: Any) -> set[str]:
    return {s.fqn for s in result.sites if (s.rule, s.status) == ("unequal_linear", "kept")}
