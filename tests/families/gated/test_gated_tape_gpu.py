"""Calls of gated_mlp as tapes, on Hopper: the very results of the Python path."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.families.gated.cuda import backend as cuda
from fastlinear.families.gated.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from tests.families.compiled_nodes import needs_nodes
from tests.families.gated.gated_ways import BIASES, ORDERS, Way, draw, formula_of, same
from tests.families.hopper_only import on_hopper

pytestmark = needs_nodes


ON_DEVICE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "sizes": (264, 72)}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@on_hopper
@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _ready(self) -> None:
        assert lookup.serves_cuda()
        assert autograd_node.serves_cuda()

    @pytest.mark.parametrize("save", [True, False])
    @pytest.mark.parametrize("bias", BIASES)
    @pytest.mark.parametrize("order", ORDERS)
    def test_the_bits_of_the_python_path(self, order: str, bias: str, save: bool) -> None:
        for shape in ((300, 128), (2, 65, 128), (5, 128)):
            given = draw(shape, order, bias, **ON_DEVICE)
            Way(formula_of("cuda", order, save), given).compare(given)

    @pytest.mark.parametrize("order", ["apart", "up_gate"])
    def test_any_gradients(self, order: str) -> None:
        for frozen in range(7):
            needs = [i != frozen for i in range(7)]
            given = draw((70, 128), order, "yes", needs, **ON_DEVICE)
            Way(formula_of("cuda", order), given).compare(given)
            if frozen == 3:
                continue  # the down weight's alone: PyTorch's ops in Python
            given = draw((70, 128), order, "yes", [i == frozen for i in range(7)], **ON_DEVICE)
            if any(t is not None and t.requires_grad for t in given):
                Way(formula_of("cuda", order), given).compare(given)

    @pytest.mark.parametrize("order", ORDERS)
    def test_planes(self, order: str) -> None:
        given: Any
        for bias, shape in itertools.product(BIASES, ((300, 128), (2, 5, 128))):
            given = draw(shape, order, bias, device="cuda", sizes=(264, 72))
            Way(formula_of("planes", order), given).compare(given)
        for kept in range(6):
            needs = [i == kept for i in range(7)]
            given = draw((70, 128), order, "yes", needs, device="cuda", sizes=(264, 72))
            wanted = [t for t in given if t is not None and t.requires_grad]
            dy, stacked = torch.randn(70, 72, device="cuda"), None if order == "apart" else order
            if wanted:
                ours, theirs = (
                    torch.autograd.grad(
                        fl.gated_mlp(*given, stacked=stacked, backend=name), wanted, dy
                    )
                    for name in ("planes", "eager")
                )
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
    def test_the_elementwise_pass(self, order: str) -> None:
        for down, shape in itertools.product((True, False), ((300, 128), (2, 5, 128))):
            given = draw(shape, order, "no", down=down, **ON_DEVICE)
            Way(formula_of("elementwise", order), given).compare(given)

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("order", ORDERS)
    def test_calls_run_without_python(
        self, order: str, grad: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once a call is known, neither direction comes back to Python, on any stream."""
        stacked = None if order == "apart" else order
        for bias, m in itertools.product(("no", "yes"), (70, 2000)):
            given: Any = draw((m, 128), order, bias, (grad,) * 7, **ON_DEVICE)
            wanted = [t for t in given if t is not None]
            dy = torch.randn((m, 72), device="cuda", dtype=torch.bfloat16)

            def run(given: Any = given, wanted: Any = wanted, dy: Any = dy) -> list[Tensor]:
                y = fl.gated_mlp(*given, stacked=stacked, backend="cuda")
                return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if grad else ())]

            FRONT.forget()
            expected = run()
            for _ in range(3):  # the kind is seen, wanted, known
                run()

            def fail(*_: Any) -> None:
                raise AssertionError("in Python")

            with monkeypatch.context() as watched:
                watched.setattr(cuda, "gate", fail)
                watched.setattr(cuda, "through_down", fail)
                same(run(), expected)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    found = run()
                torch.cuda.current_stream().wait_stream(side)
                same(found, expected)

    def test_other_addresses_go_back_to_python(self) -> None:
        given = draw((70, 128), "apart", "yes", **ON_DEVICE)
        way = Way(formula_of("cuda", "apart"), given)
        way.compare(given)
        x = given[0]
        assert x is not None
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        with torch.no_grad():
            moved.copy_(x)
        way.python = True
        other = [moved.requires_grad_(), *given[1:]]
        same([way(other)], [way(given)])
