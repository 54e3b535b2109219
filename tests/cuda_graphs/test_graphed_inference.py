"""What a graphed callable returns without gradients, for every kind of argument and mode."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from tests.cuda_graphs.cases import gradients, mlp


@torch.no_grad()
def test_outputs_are_the_callers_own(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    y1 = g(x1)
    kept = y1.clone()
    y2 = g(x2)
    assert torch.equal(y1, kept)
    assert not torch.equal(y1, y2)
    y2.zero_()
    assert_close(g(x1), kept)


@torch.no_grad()
def test_modes_have_graphs_of_their_own(device: str) -> None:
    model = mlp(device, middle=lambda: nn.Dropout(0.9))
    g = graphed(model)
    x = torch.randn(64, 4, device=device)
    torch.manual_seed(3)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(3)
    for y in expected:  # random numbers go on from call to call
        assert_close(g(x), y)
    model.eval()
    assert_close(g(x), model(x))
    model.train()
    g(x)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_a_generator_of_the_callers_goes_on(device: str) -> None:
    generator = torch.Generator(device)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    x = torch.zeros(4, 4, device=device)
    generator.manual_seed(5)
    expected = [noisy(x) for _ in range(3)]
    generator.manual_seed(5)
    g = graphed(noisy)
    for y in expected:
        assert_close(g(x), y)


@torch.no_grad()
def test_autocast_is_part_of_the_key(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)
    assert g(x).dtype == torch.float32
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert_close(g(x), model(x))
            model[0].weight.mul_(1.5)  # inside one context torch itself keeps the old cast
        with torch.autocast(device, dtype=torch.bfloat16):
            y, expected = g(x), model(x)
        assert y.dtype == torch.bfloat16
        assert_close(y, expected)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_structures_keywords_and_constants(device: str) -> None:
    Pair = namedtuple("Pair", "a b")

    def f(pair: Any, *, scale: float, rest: dict[str, Any]) -> dict[str, Any]:
        return {"s": (pair.a + pair.b) * scale, "r": [rest["x"][0] * 2, "word", None]}

    g = graphed(f)
    a, b, x = (torch.randn(2, device=device) for _ in range(3))
    for scale in (2.0, 3.0, 2.0):
        y = g(Pair(a, b), scale=scale, rest={"x": (x, 7)})
        assert_close(y["s"], (a + b) * scale)
        assert_close(y["r"][0], x * 2)
        assert y["r"][1:] == ["word", None]
    assert g.counts.recorded == 2
    with pytest.raises(UnsupportedError, match=r"type builtins\.object"):
        g(Pair(a, b), scale=1.0, rest={"x": object()})


@torch.no_grad()
def test_numbers_that_compare_equal_are_told_apart(device: str) -> None:
    g = graphed(lambda x, k: x * (2 if k is True else 3))
    x = torch.ones(2, device=device)
    assert g(x, 1)[0] == 3
    assert g(x, True)[0] == 2
    g = graphed(lambda x, k: x * math.copysign(1.0, k))
    assert g(x, 0.0)[0] == 1
    assert g(x, -0.0)[0] == -1


@torch.no_grad()
def test_strided_and_conjugate_free_inputs(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    wide = torch.randn(3, 8, device=device)
    for x in (wide[:, ::2], wide[:, :4], torch.randn(4, 3, device=device).t()):
        assert_close(g(x), model(x))
    z = torch.view_as_complex(torch.randn(3, 4, 2, device=device)).conj().imag
    assert z.is_neg()
    assert_close(g(z.contiguous() if not z.is_neg() else z), model(z))


def test_inference_mode_and_back(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    with torch.inference_mode():
        x = torch.randn(3, 4, device=device)
        assert_close(g(x), model(x))
    with torch.no_grad():
        for x in (torch.randn(3, 4, device=device), torch.randn(3, 8, device=device)[:, ::2]):
            assert_close(g(x), model(x))
    x = torch.randn(3, 4, device=device)
    assert_close(gradients(g, model, x), gradients(model, model, x))


@torch.no_grad()
def test_buffers_are_changed_once_a_call(device: str) -> None:
    ours, theirs = nn.BatchNorm1d(4).to(device), nn.BatchNorm1d(4).to(device)
    g = graphed(ours)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        assert_close(g(x), theirs(x))
    assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 3


@torch.no_grad()
def test_input_buffers_are_not_copied(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    (buffer,) = g.input_buffers(torch.zeros(3, 4, device=device))
    buffer.copy_(torch.randn(3, 4, device=device))
    assert_close(g(buffer), model(buffer))
    assert g.counts.recorded == 1


@torch.no_grad()
def test_arguments_by_address_are_read_and_written_in_place(device: str) -> None:
    def append(cache: Tensor, x: Tensor, *, scale: Tensor) -> Tensor:
        cache.add_(x)
        return cache * scale

    g = graphed(append, by_address=(0, "scale"))
    x, scale = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    for cache in (torch.zeros(2, device=device), torch.ones(2, device=device)):
        start = cache.clone()
        for i in range(1, 4):
            assert_close(g(cache, x, scale=scale), (start + i) * 3)
        assert_close(cache, start + 3)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_reused_outputs_refuse_to_be_read_late(device: str) -> None:
    model = mlp(device)
    g = graphed(model, reuse_outputs=True)
    x = torch.randn(2, 4, device=device)
    y = g(x)
    row, total = y[0], y.sum()
    assert_close(y + 0, model(x))
    assert type(y + 0) is Tensor
    before = model(x).sum()
    g(x * 2)
    for read in (lambda: y + 0, lambda: row.cpu(), lambda: torch.cat([y, y]), lambda: repr(y)):
        with pytest.raises(UnsupportedError, match="later call has overwritten"):
            read()
    assert_close(total, before)
    loop = graphed(nn.Linear(4, 4, device=device), reuse_outputs=True)
    y = loop(x)
    assert loop(y).shape == (2, 4)  # its own output as its next input
