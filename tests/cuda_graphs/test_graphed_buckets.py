"""Batches of changing size: buckets, padding, and how many graphs are kept."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fastlinear as fl
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from tests.cuda_graphs.cases import counts, gradients, mlp


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


DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "a small term": lambda x: x + 0.001 * x.shape[0],
    "a small power": lambda x: x * x.shape[0] ** 0.02,
    "one in a million": lambda x: x * (1 + 1e-6 * x.shape[0]),
    "ones summed": lambda x: x + 1e-4 * torch.ones_like(x).sum(0),
    "through another dtype": lambda x: (x.to(torch.bfloat16) * x.shape[0] ** 0.002).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", DEPENDENT)
@torch.no_grad()
def test_the_slightest_dependence_on_the_number_of_rows_is_refused(
    device: str, name: str, dtype: torch.dtype
) -> None:
    layer = nn.Linear(4, 4, device=device, dtype=dtype)
    for rows in (3, 16):
        x = torch.randn(rows, 4, device=device, dtype=dtype)
        with pytest.raises(UnsupportedError, match="change with the number of rows"):
            graphed(lambda x: DEPENDENT[name](layer(x)), batch_dim=0)(x)


class Attention(nn.Module):
    """Positions, a mask, a norm in float32 inside, a last row picked by index."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("at", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(h.transpose(1, 2).flatten(2)))
        last = torch.full((len(x),), x.shape[1] - 1, device=x.device)
        return x[torch.arange(len(x), device=x.device), last]


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "deep": lambda: nn.Sequential(
        *[m for _ in range(12) for m in (nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))]
    ),
    "attention": lambda: Attention(64),
    "transformer layer": lambda: nn.TransformerEncoderLayer(64, 2, 128, batch_first=True),
    "fastlinear's": lambda: fl.nn.MLP([64, 64, 64]),
    "convolution": lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.GELU()),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ORDINARY)
@torch.no_grad()
def test_ordinary_models_are_padded(
    device: str, name: str, dtype: torch.dtype, autocast: bool
) -> None:
    if autocast and name == "transformer layer" and device == "cpu":
        pytest.skip("torch's fast path of this layer does not know the CPU's autocast")
    model = ORDINARY[name]().to(device, dtype).eval()
    g = graphed(model, batch_dim=0)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        for rows in (7, 3, 30):
            x = torch.randn(rows, 8, 64, device=device, dtype=dtype)
            y = g(x)
            assert_close(y, model(x), rtol=0.05, atol=0.05)
    assert counts(g) == (3, 3, 0)


@torch.no_grad()
def test_what_does_not_run_in_float64_is_compared_coarsely(device: str) -> None:
    def f(x: Tensor, *, factor: Callable[[Tensor], float]) -> Tensor:
        assert x.dtype is torch.float32
        return x * factor(x)

    x = torch.randn(3, 4, device=device)
    good = functools.partial(f, factor=lambda x: 2.0)
    assert_close(graphed(lambda x: good(x), batch_dim=0)(x), 2 * x)
    bad = functools.partial(f, factor=lambda x: x.shape[0] ** 0.5)
    with pytest.raises(UnsupportedError, match="change with the number of rows"):
        graphed(lambda x: bad(x), batch_dim=0)(x)


@torch.no_grad()
def test_the_check_leaves_weights_and_buffers_as_they_were(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(device).eval()
    before = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    graphed(model, batch_dim=0)(torch.randn(3, 4, device=device))
    for k, v in model.state_dict(keep_vars=True).items():
        assert v is before[k][0]
        assert torch.equal(v, before[k][1])


def test_a_batch_dim_that_no_argument_has(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    for on_unsupported in ("error", "eager"):
        g = graphed(nn.ReLU(), batch_dim=3, on_unsupported=on_unsupported)
        with pytest.raises(InputError, match=r"batch_dim=3.*\(3, 4\)"):
            g(x)
    other = graphed(torch.mul, batch_dim=1)
    assert_close(other(x, torch.tensor(2.0, device=device)), 2 * x)


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
