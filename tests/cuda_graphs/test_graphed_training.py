"""Forward and backward as graphs: gradients, optimizers, several forwards under way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from tests.cuda_graphs.cases import counts, gradients, mlp


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("batch_dim", [None, 0])
def test_gradients_are_the_callables(device: str, rows: int, batch_dim: int | None) -> None:
    model = mlp(device, middle=nn.GELU)
    g = graphed(model, batch_dim=batch_dim)
    for _ in range(3):
        x = torch.randn(rows, 4, device=device)
        assert_close(gradients(g, model, x), gradients(model, model, x))
    assert counts(g) == (1, 3, 0)


def test_gradients_accumulate_and_are_never_overwritten(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    one, two = gradients(model, model, x1)[1:], gradients(model, model, x2)[1:]
    model.zero_grad()
    g(x1).square().sum().backward()
    first = [p.grad for p in model.parameters()]
    kept = [t.clone() for t in first if t is not None]
    g(x2).square().sum().backward()
    assert_close(
        [p.grad for p in model.parameters()], [a + b for a, b in zip(one, two, strict=True)]
    )
    model.zero_grad(set_to_none=True)
    g(x1).square().sum().backward()
    held = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    g(x2).square().sum().backward()
    assert_close(held, kept)


def test_a_training_output_is_kept_and_its_graph_free_after_the_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    y = g(torch.randn(2, 4, device=device))
    kept = y.detach().clone()
    y.sum().backward()
    g(torch.randn(2, 4, device=device)).sum().backward()
    assert torch.equal(y, kept)
    assert g.counts.recorded == 1


def test_training_follows_the_optimizer(device: str) -> None:
    ours = mlp(device)
    theirs = copy.deepcopy(ours)
    g = graphed(ours, batch_dim=0)
    steps = [
        (run, torch.optim.Adam(m.parameters(), 0.01)) for run, m in ((g, ours), (theirs, theirs))
    ]
    for i in range(6):
        x, target = torch.randn(5 - i % 2, 4, device=device), torch.randn(3, device=device)
        for run, optimizer in steps:
            optimizer.zero_grad()
            (run(x) - target).square().mean().backward()
            optimizer.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()))
    assert counts(g) == (2, 6, 0)


def test_what_only_an_unused_output_depends_on_has_no_gradient(device: str) -> None:
    """A zero in its place would let an optimizer with momentum or decay move a head."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one = nn.Linear(4, 4), nn.Linear(4, 2)
            self.two = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.body(x))
            return self.one(h), self.two(h) * y

    ours = Heads().to(device)
    theirs = copy.deepcopy(ours)
    g = graphed(ours)
    for used in ([0], [1], [0, 1]):
        given = [torch.randn(3, n, device=device) for n in (4, 2)]
        found = []
        for run, model in ((g, ours), (theirs, theirs)):
            model.zero_grad()
            x, y = (t.clone().requires_grad_() for t in given)
            outputs = run(x, y)
            torch.stack([outputs[i].square().sum() for i in used]).sum().backward()
            found.append([x.grad, y.grad, *(p.grad for p in model.parameters())])
        assert [a is None for a in found[0]] == [b is None for b in found[1]]
        assert_close(*([t for t in grads if t is not None] for grads in found))


def test_two_forwards_before_a_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    for _ in range(2):
        model.zero_grad()
        (g(x1).sum() * 2 + g(x2).square().sum()).backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        (model(x1).sum() * 2 + model(x2).square().sum()).backward()
        assert_close(ours, [p.grad for p in model.parameters()])
    assert g.counts.recorded == 2  # one graph for each forward under way
    for _ in range(4):
        g(x1)  # dropped without a backward: its graph is free again
    gc.collect()
    assert g.counts.recorded == 2


def test_a_graph_leaves_only_after_its_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model, max_graphs=1)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device)
    expected = gradients(model, model, x1)[1:]
    model.zero_grad()
    loss = g(x1).square().sum()
    with torch.no_grad():
        g(x2)
        g(x2 * 3)
    loss.backward()
    assert_close([p.grad for p in model.parameters()], expected)


def test_frozen_parameters_unused_inputs_and_mixed_outputs(device: str) -> None:
    model = mlp(device)
    model[0].weight.requires_grad_(False)

    def f(x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = model(x)
        return y, y.argmax(-1), y.detach()

    g = graphed(f)
    x, unused = (torch.randn(2, 4, device=device, requires_grad=True) for _ in range(2))
    y, index, detached = g(x, unused)
    assert y.requires_grad
    assert not index.requires_grad
    assert not detached.requires_grad
    y.sum().backward()
    assert unused.grad is None
    assert model[0].weight.grad is None
    ours = [x.grad, model[0].bias.grad, model[2].weight.grad]
    assert x.grad is not None
    x.grad = None
    model.zero_grad()
    f(x, unused)[0].sum().backward()
    assert_close(ours, [x.grad, model[0].bias.grad, model[2].weight.grad])
    model[0].weight.requires_grad_(True)
    g(x, unused)[0].sum().backward()
    assert model[0].weight.grad is not None


def test_what_a_replayed_backward_cannot_do_is_refused(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    loss = g(x).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="retain_graph"):
        loss.backward()
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
    loss = g(x).square().sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(UnsupportedError, match="modified in place"):
        loss.backward()
    loss = g(x).square().sum()
    with torch.no_grad():
        model[2].bias.add_(1)  # no backward reads a bias
    loss.backward()


def test_a_parameter_in_the_same_memory_is_checked_as_well(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    g(x).sum().backward()
    model[2].weight = nn.Parameter(model[2].weight.data)
    loss = g(x).square().sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(UnsupportedError, match="modified in place"):
        loss.backward()
    assert g.counts.recorded == 1


def test_autocast_training(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)

    def under(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return run(x).float()

        return call

    for _ in range(2):
        assert_close(gradients(under(g), model, x), gradients(under(model), model, x))
        with torch.no_grad():
            model[0].weight.mul_(1.5)
