"""What no graph can hold is refused with its line, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from tests.cuda_graphs.cases import counts, mlp


def read_item(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def read_truth(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def read_shape(x: Tensor) -> Tensor:
    return x[x > 0]


def read_nonzero(x: Tensor) -> Tensor:
    return torch.nonzero(x)


def write_argument(x: Tensor) -> Tensor:
    return x.add_(1)


@pytest.mark.parametrize("f", [read_item, read_truth, read_shape, read_nonzero, write_argument])
def test_what_no_graph_can_hold_names_its_line(device: str, f: Callable[..., Tensor]) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(UnsupportedError, match=r"test_graphed_refusals.py:\d+: `return"):
        graphed(f)(x)
    assert torch.equal(x, torch.ones_like(x))
    ok = graphed(mlp(device))
    assert ok(torch.ones(2, 4, device=device)).shape == (2, 3)  # recording still works
    eager = graphed(f, on_unsupported="eager")
    with pytest.warns(UserWarning, match="runs its target plainly"):
        eager(x.clone())
    eager(x.clone())  # said once
    assert counts(eager) == (0, 0, 2)


def test_values_moved_to_another_device_are_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match=r"a copy to meta at .*x\.to\("):
        graphed(lambda x: x.to("meta"))(torch.ones(2, device=device))


@pytest.mark.gpu
def test_a_capture_that_fails_names_its_line_and_leaves_nothing_behind() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0], device="cuda")

    x = torch.ones(1, device="cuda")
    with pytest.raises(
        UnsupportedError, match=r"test_graphed_refusals.py:\d+: `return x \+ torch.t"
    ):
        graphed(f)(x)
    # memory freed on another stream is used again: the allocator knows that no capture runs
    side = torch.cuda.Stream()
    reserved = []
    for _ in range(6):
        big = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        big.record_stream(side)
        del big
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]
    torch.randn(1, device="cuda")  # and so are random numbers
    g = graphed(mlp("cuda"))
    assert g(torch.ones(2, 4, device="cuda")).shape == (2, 3)


def test_a_tensor_without_storage_is_refused_or_runs_plainly(device: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.w, x)

    module, x = Sparse().to(device), torch.ones(4, 2, device=device)
    with pytest.raises(UnsupportedError, match=r"torch\.sparse_coo tensor without storage"):
        graphed(module)(x)
    with pytest.warns(UserWarning, match="runs its target plainly"):
        assert_close(graphed(module, on_unsupported="eager")(x), x)


def test_options_are_checked() -> None:
    for options in (
        {"max_graphs": 0},
        {"batch_buckets": [4]},
        {"batch_dim": 0, "batch_buckets": []},
        {"batch_dim": 0, "batch_buckets": [0]},
        {"on_unsupported": "ignore"},
        {"batch_dim": -1},
        {"batch_dim": True},
        {"batch_dim": 0, "batch_buckets": 8},
        {"max_graphs": "3"},
        {"warmup": 1.5},
        {"reuse_outputs": "yes"},
        {"by_address": "cache"},
        {"by_address": 0},
        {"by_address": (-1,)},
        {"by_address": (True,)},
        {"watch": [3]},
        {"watch": ["weight"]},
        {"watch": nn.ReLU()},
        {"watch": torch.ones(2)},
    ):
        with pytest.raises(InputError, match="graphed"):
            graphed(nn.ReLU(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="module or function"):
        graphed(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="received the class Linear"):
        graphed(nn.Linear)


@torch.no_grad()
def test_by_address_finds_an_argument_however_it_is_passed(device: str) -> None:
    def append(x: Tensor, cache: Tensor, count: Tensor | None = None) -> Tensor:
        if count is not None:
            count.add_(1)
        return cache.add_(x).clone()

    x = torch.ones(2, device=device)
    for by_address in (("cache", "count"), (1, 2)):
        g = graphed(append, by_address=by_address)
        cache, count = torch.zeros(2, device=device), torch.zeros(1, device=device)
        g(x, cache)  # without the one that has a default
        g(x, cache=cache)
        g(x, cache, count)
        g(cache=cache, x=x, count=count)
        assert cache.tolist() == [4, 4]
        assert count.item() == 2


class Takes(nn.Module):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return x + sum(others.values())


@torch.no_grad()
def test_by_address_that_matches_nothing_is_told_at_the_call(device: str) -> None:
    x = torch.ones(2, device=device)
    for target in (lambda x, cache=None: x + 1, Takes().to(device), torch.add):
        for by_address in (("cach",), (3,)):
            g = graphed(target, by_address=by_address, on_unsupported="eager")
            with pytest.raises(InputError, match="by_address to name arguments of the call"):
                g(x)
    assert_close(graphed(Takes(), by_address=("more",))(x, more=x), x + x)


def test_a_cpu_tensor_is_refused_or_runs_plainly() -> None:
    model, x = mlp("cpu"), torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="one cuda device"):
        graphed(model)(x)
    g = graphed(model, on_unsupported="eager")
    with pytest.warns(UserWarning, match=r"tensor on cpu|argument on cpu"):
        assert_close(g(x), model(x))
    assert_close(g(x), model(x))  # said once
