"""Batches of changing size: buckets, padding, and how many graphs are kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import UnsupportedError
from fastlinear.nn.graphed import graphed
from tests.nn.graphed.cases import counts, gradients, mlp


@torch.no_grad()
def test_every_batch_size_through_few_graphs(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    for rows in (3, 4, 1, 2, 7, 8, 5, 3):
        x = torch.randn(rows, 4, device=device)
        y = g(x)
        assert y.shape == (rows, 3)
        assert_close(y, model(x))
    assert counts(g) == (4, 8, 0)  # buckets 4, 1, 2, 8


@torch.no_grad()
def test_rows_beyond_the_largest_bucket_and_no_rows_run_plainly(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0, batch_buckets=[4, 2])
    for rows in (0, 5):
        x = torch.randn(rows, 4, device=device)
        assert_close(g(x), model(x))
    assert counts(g) == (0, 0, 2)
    assert g(torch.randn(3, 4, device=device)).shape == (3, 3)
    assert counts(g) == (1, 1, 2)


@torch.no_grad()
def test_random_callables_are_recorded_at_exact_sizes(device: str) -> None:
    g = graphed(nn.Dropout(0.5), batch_dim=0)
    for rows in (3, 4, 3):
        assert g(torch.ones(rows, 4, device=device)).shape == (rows, 4)
    assert counts(g) == (2, 3, 0)


def test_rows_that_depend_on_each_other_are_refused(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    for f in (
        nn.BatchNorm1d(4).to(device),
        lambda x: x.softmax(0),
        lambda x: x - x.mean(),
        lambda x: x.sum(),
        lambda x: x * x.shape[0],
        lambda x: x.flip(0),
        lambda x: x.t() @ x,
    ):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="every row of the batch alone"):
            graphed(f, batch_dim=0)(x)
    with torch.no_grad():
        assert_close(graphed(lambda x: x.softmax(0))(x), x.softmax(0))
        norm = nn.BatchNorm1d(4).to(device).eval()
        assert_close(graphed(norm, batch_dim=0)(x), norm(x))


def test_padded_rows_add_nothing_to_gradients(device: str) -> None:
    layer = nn.Linear(4, 3, device=device)

    def f(x: Tensor) -> Tensor:
        return layer(x / x.norm(dim=-1, keepdim=True))  # a row of zeros would be NaN

    g = graphed(f, batch_dim=0)
    x = torch.randn(5, 4, device=device)
    gradients(g, layer, torch.full((8, 4), float("nan"), device=device))
    assert_close(gradients(g, layer, x), gradients(f, layer, x))


@torch.no_grad()
def test_graphs_are_bounded_and_freed(device: str) -> None:
    g = graphed(mlp(device), max_graphs=2)
    for rows in (1, 2, 3, 4, 3, 4, 1):
        g(torch.randn(rows, 4, device=device))
    assert g.counts.recorded == 5
    assert g.counts.freed == 3
    assert "graphs=2" in repr(g)
    g.clear()
    assert "graphs=0" in repr(g)
    x = torch.randn(2, 4, device=device)
    assert_close(g(x), g.target(x))


@pytest.mark.gpu
@torch.no_grad()
def test_memory_is_bounded_and_given_back() -> None:
    layer = nn.Linear(1024, 1024, device="cuda")
    g = graphed(layer, max_graphs=2)
    x = torch.randn(4096, 1024, device="cuda")
    for rows in (4096, 4095):
        g(x[:rows])
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for rows in range(4000, 4010):
        g(x[:rows])
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
    g.clear()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held - 4 * 4000 * 1024 * 4 + (1 << 20)
    assert_close(g(x), layer(x))
