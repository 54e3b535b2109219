"""Models and measures that the tests of graphed callables share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fastlinear.cuda_graphs.graphed import Graphed


def mlp(device: str, *, middle: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 3)).to(device)


def counts(g: Graphed) -> tuple[int, int, int]:
    return g.counts.recorded, g.counts.replayed, g.counts.plain


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    run(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
