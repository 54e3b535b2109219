"""Outputs of training steps are lent where the graph writes them, while steps drop them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from tests.cuda_graphs.cases import counts, mlp


def train_step(g: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    g.zero_grad()  # type: ignore[attr-defined]
    g(x).square().sum().backward()
    return [p.grad.clone() for p in g.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("last", [nn.ReLU, nn.Identity])
def test_outputs_of_steps_that_drop_them_are_lent(device: str, last: type[nn.Module]) -> None:
    model = mlp(device)
    model.append(last().to(device))
    g = graphed(model)
    xs = list(torch.randn(9, 2, 4, device=device))
    for x in xs:
        assert_close(train_step(g, x), train_step(model, x))
    (entry,) = g._graphs._graphs._values.values()
    assert entry._lent
    y = g(xs[0])
    assert y.data_ptr() == entry.outputs[0].data_ptr()
    y.square().sum().backward()
    others = [g(x) for x in xs[1:4]]  # a loan that is kept: the other forwards leave it alone
    assert_close([y, *others], [model(x) for x in xs[:4]])
    sum(o.square().sum() for o in others).backward()
    del y, others
    for x in xs:
        y = g(x)
        assert_close(y, model(x))
        assert_close(train_step(g, x), train_step(model, x))
    assert not any(e._lent for e in g._graphs._graphs._values.values())


def test_a_lent_output_that_the_backward_reads_may_not_change(device: str) -> None:
    for last, refused in ((nn.ReLU(), True), (nn.Identity(), False)):
        model = mlp(device)
        model.append(last)
        g = graphed(model)
        x = torch.randn(2, 4, device=device)
        for _ in range(5):
            train_step(g, x)
        y = g(x)
        y.add_(1)
        if refused:
            with pytest.raises(UnsupportedError, match="modified in place"):
                y.sum().backward()
        else:
            model.zero_grad()
            y.sum().backward()
            ours = model[0].weight.grad
            model.zero_grad()
            model(x).sum().backward()
            assert_close(ours, model[0].weight.grad)


def test_an_argument_passed_through_a_step_is_a_copy(device: str) -> None:
    model = mlp(device)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), x

    g = graphed(f)
    for x in torch.randn(6, 2, 4, device=device):
        y, same = g(x)
        y.sum().backward()
        assert_close(same, x)
        del y, same
    assert counts(g) == (1, 6, 0)
