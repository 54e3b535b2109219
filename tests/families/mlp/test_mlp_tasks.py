"""Backward ``tasks_cuda`` against float64: its CUDA C++ run on a CPU, thread by thread; on a GPU.

What cannot be seen on a CPU: whether the instructions do what ``emulated_hopper.h`` says they do,
and blocks that run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import operands, tasks_backend
from fastlinear.families.mlp.cuda.tasks import CANDIDATES, Tiles
from tests.kernels.emulation import emulate

_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _GPU])], autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where tensors lie; on a CPU launches are emulated."""
    with torch.device(request.param), pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            emulate(patch, tasks_backend)
        yield
    if request.param == "cpu":
        tasks_backend._plans.clear()
        operands._copies_plans.clear()


class Chain:
    """Tensors of a chain."""

    def __init__(
        self, m: int, widths: tuple[int, ...], names: tuple[str, str], dtype: torch.dtype = BF16
    ) -> None:
        draw = torch.Generator("cpu").manual_seed(m)

        def values(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, generator=draw, device="cpu") * scale
            return drawn.to(torch.get_default_device(), dtype)

        self.names, self.layers = names, len(widths) - 1
        self.x = values(m, widths[0])
        self.weights = tuple(values(n, k, scale=(2 / k) ** 0.5) for k, n in pairwise(widths))
        biases = tuple(None if i == 1 else values(n) for i, n in enumerate(widths[1:]))
        self.dy = values(m, widths[-1])
        self.saved = reference.forward(self.x, self.weights, biases, *names, True)[1]
        self.all = True, (True,) * self.layers, tuple(b is not None for b in biases)

    def keep_hidden(self) -> None:
        """Have the outputs of hidden layers behind what the backward reads."""
        self.saved = reference.forward(
            self.x, self.weights, (None,) * self.layers, *self.names, True, True
        )[1]
        assert len(self.saved) == 2 * self.layers - 1

    def results(self, config: Tiles | None = None, needs: Any = None) -> list[Tensor | None]:
        """All gradients in one list."""
        given = self.dy, self.x, self.weights, self.saved, *self.names, needs or self.all
        dx, dws, dbs = tasks_backend.backward(*given, config=config)
        return [dx, *dws, *dbs]

    def check(self, config: Tiles | None = None, needs: Any = None) -> None:
        """All gradients against float64, beside PyTorch's own."""

        def own(dtype: torch.dtype) -> list[Tensor | None]:
            ws, kept = ([t.to(dtype) for t in ts] for ts in (self.weights, self.saved))
            given = self.dy.to(dtype), self.x.to(dtype), tuple(ws), tuple(kept), *self.names
            dx, dws, dbs = reference.backward(*given, needs or self.all)
            return [dx, *dws, *dbs]

        found = self.results(config, needs), own(self.x.dtype), own(torch.float64)
        for i, (ours, theirs, oracle) in enumerate(zip(*found, strict=True)):
            assert (ours is None) == (oracle is None), i
            if ours is not None and theirs is not None and oracle is not None:
                assert ours.shape == oracle.shape
                verdict = judge(f"gradient {i}", ours, theirs, oracle)
                assert verdict.passed, str(verdict)


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_gradient(config: Tiles) -> None:
    Chain(200, (63, 128, 100, 4), ("relu", "none")).check(config)
    Chain(330, (70, 140, 64), ("gelu", "gelu"), FP16).check(config)


@pytest.mark.parametrize("names", [("tanh", "relu"), ("silu", "none"), ("none", "softplus")])
def test_activations(names: tuple[str, str]) -> None:
    Chain(150, (40, 72, 9, 30), names).check()


@pytest.mark.parametrize(
    "needs",
    [
        (False, (True, True, True), (True, False, True)),
        (False, (False, False, True), (False, False, True)),
        (False, (False, True, False), (False, False, False)),
        (True, (False, False, False), (False, False, False)),
        (False, (False, False, False), (True, False, False)),
        (False, (False,) * 3, (False,) * 3),
    ],
    ids=str,
)
def test_only_wanted_gradients(needs: Any) -> None:
    for names in (("relu", "none"), ("gelu", "relu")):
        Chain(130, (16, 24, 33, 8), names).check(needs=needs)


def test_slices_of_the_rows() -> None:
    chain = Chain(1500, (64, 64, 40), ("relu", "none"))
    chain.check(Tiles(1, 64, 4))
    chain.check(Tiles(2, 128, 3))


def test_tensors_that_begin_anywhere() -> None:
    chain = Chain(70, (32, 64, 16), ("relu", "relu"))

    def moved(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    chain.weights = moved(chain.weights[0]), chain.weights[1].t().contiguous().t()
    chain.x, chain.dy = moved(chain.x), moved(chain.dy)
    chain.saved = tuple(map(moved, chain.saved))
    chain.check()
    chain.dy = chain.dy.repeat(1, 2)[:, ::2]
    chain.check()


@pytest.mark.parametrize("n", [300, 301, 131])
def test_dy_of_many_columns_is_graded_by_several_tasks(n: int) -> None:
    for names in (("relu", "tanh"), ("gelu", "none")):
        Chain(70, (16, 24, n), names).check(CANDIDATES[0])


@pytest.mark.parametrize("final", ["none", "tanh", "gelu"])
def test_outputs_of_hidden_layers_are_left_alone(final: str) -> None:
    chain = Chain(70, (16, 40, 24), ("gelu", final))
    chain.keep_hidden()
    chain.check()


def test_one_row_and_one_feature() -> None:
    Chain(1, (1, 1), ("relu", "none")).check()
    Chain(1, (5, 1, 3), ("gelu", "none")).check()


def test_a_plan_serves_its_kind_alone() -> None:
    """The same sizes, other dtypes, activations and strides, one after the other."""
    for names in (("relu", "none"), ("gelu", "none"), ("relu", "tanh")):
        for dtype in (BF16, FP16):
            Chain(70, (32, 48, 16), names, dtype).check()
    chain = Chain(70, (32, 48, 16), ("relu", "none"))
    chain.x = chain.x.repeat(1, 2)[:, 32:]
    chain.check()
    chain.dy = chain.dy.repeat(1, 3)[:, 16:32]
    chain.check()


@pytest.mark.gpu
@_GPU
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
def test_recorded_in_a_graph() -> None:
    chain = Chain(1000, (63, 256, 100, 4), ("gelu", "none"))
    chain.results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.results()
    chain.dy.copy_(chain.dy.flip(0))
    graph.replay()
    for ours, own in zip(found, chain.results(), strict=True):
        assert ours is None or torch.equal(ours, own)


@pytest.mark.gpu
@_GPU
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("m", "widths"),
    [
        (2048, (415, 512, 512, 256, 1)),
        (4096, (376, 256, 256, 17)),
        (16_385, (415, 512, 512, 256, 1)),
        (1000, (100, 1024, 2048, 10)),
        (70_001, (32, 64, 64, 64, 16)),
    ],
    ids=str,
)
def test_many_rows_and_the_same_bits_every_time(m: int, widths: tuple[int, ...]) -> None:
    for names in (("relu", "none"), ("gelu", "none")):
        chain = Chain(m, widths, names)
        for config in CANDIDATES:
            chain.check(config)
            first = chain.results(config)
            for _ in range(50):
                for ours, own in zip(chain.results(config), first, strict=True):
                    assert ours is None or torch.equal(ours, own)
