"""gated_mlp by planes against float64: CUDA C++ run on a CPU, thread by thread, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import Verdict, judge, pooled
from fastlinear.families.gated import reference
from fastlinear.families.gated.autograd import run_backward
from fastlinear.families.gated.cuda import planes
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.stacking import Biases, Weights
from tests.families.gated.gated_ways import ALL, BIASES, ORDERS, draw
from tests.families.planes_places import PLACES, placed

_EMULATED = ("silu", "relu", "tanh")


@pytest.fixture(params=PLACES, autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    with placed(request.param):
        yield


def drawn(
    shape: tuple[int, int], order: str, bias: str = "yes", sizes: tuple[int, int] = (40, 24)
) -> list[Tensor | None]:
    """x, three weights, three biases."""
    return [None if t is None else t.detach() for t in draw(shape, order, bias, sizes=sizes)]


def judged(
    given: Sequence[Tensor | None],
    order: str,
    activation: str = "silu",
    needs: Sequence[bool] = ALL,
    dy: Tensor | None = None,
    formed_again: bool = False,
) -> list[Verdict]:
    """Forward and backward, beside PyTorch's own operations, and float64."""
    first = given[0]
    assert first is not None
    results: list[list[Tensor | None]] = []
    wanted: Any = tuple(n and t is not None for n, t in zip(needs, given, strict=True))
    for dtype in (torch.float32, torch.float64):
        held: Any = [None if t is None else t.to(dtype) for t in given]
        x, weights, biases = held[0], Weights(*held[1:4]), Biases(*held[4:])
        y, *pre = reference.forward(x, weights, biases, activation, order, True)
        if dy is None:
            dy = torch.randn_like(y)
        into: Any = dy.to(dtype), tuple(pre), x, weights, biases, activation, order, wanted
        results.append([y, *pre, *reference.backward(*into)])
        if dtype == torch.float32:
            y, *own_pre = planes.forward(x, weights, biases, activation, order, True)
            (alone, *none) = planes.forward(x, weights, biases, activation, order, False)
            assert torch.equal(y, alone)
            assert none == [None, None]
            kept = None if formed_again else tuple(pre)
            ours = [y, *own_pre, *planes.backward(dy, kept, *into[2:])]
    verdicts = []
    for own, theirs, oracle in zip(ours, *results, strict=True):
        assert (own is None) == (oracle is None)
        if own is not None:
            assert theirs is not None
            assert oracle is not None
            assert own.shape == oracle.shape
            verdicts.append(judge("gated", own, theirs, oracle))
    return verdicts


def check(*given: Any, **how: Any) -> None:
    """All of ``judged`` pass."""
    for verdict in judged(*given, **how):
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bias", BIASES)
def test_every_gradient(order: str, bias: str) -> None:
    check(drawn((70, 33), order, bias), order)


@pytest.mark.parametrize("activation", [*ACTIVATIONS])
def test_every_activation(activation: str) -> None:
    if torch.empty(0).is_cpu and activation not in _EMULATED:
        pytest.skip("emulated kernels are compiled one by one")
    check(drawn((70, 33), "apart", sizes=(130, 70)), "apart", activation)


@pytest.mark.parametrize("kept", range(7))
@pytest.mark.parametrize("order", ["apart", "gate_up"])
def test_gradients_of_one_and_of_all_others(order: str, kept: int) -> None:
    given = drawn((66, 20), order)
    check(given, order, needs=[i == kept for i in range(7)])
    check(given, order, needs=[i != kept for i in range(7)], formed_again=True)


@pytest.mark.parametrize(
    ("shape", "sizes"), [((1, 40), (70, 9)), ((3, 65), (130, 33)), ((65, 64), (64, 8))]
)
def test_odd_sizes(shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    for order in ("apart", "up_gate"):
        check(drawn(shape, order, sizes=sizes), order)


def test_any_layout() -> None:
    given: list[Any] = drawn((70, 33), "apart")
    for i in range(4):
        given[i] = given[i].t().contiguous().t()
    check(given, "apart", dy=torch.randn(70, 1).expand(70, 24).contiguous())
    given[0] = torch.randn(70, 66)[:, ::2]
    check(given, "apart", formed_again=True)


@pytest.mark.parametrize("order", ["apart", "gate_up"])
def test_rows_in_parts(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "_AT_ONCE", 128 * 40)
    given = drawn((300, 20), order)
    assert len(planes.row_parts(300, 20, 40)) == 3
    check(given, order)
    check(given, order, needs=(False, True, False, True, True, True, True), formed_again=True)


@pytest.mark.parametrize("wanted", [(3,), (6,), (3, 6)])
@pytest.mark.parametrize("order", ORDERS)
def test_the_down_projection_alone(order: str, wanted: tuple[int, ...]) -> None:
    """As autograd calls it then: without x, and with dy in place of other tensors."""
    given: Any = drawn((9, 20), order, sizes=(70, 24))
    x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:])
    _, *pre = reference.forward(x, weights, biases, "silu", order, True)
    dy, needs = torch.randn(9, 24), tuple(i in wanted for i in range(7))
    names: Any = "silu", order, needs
    ours = run_backward(dy, tuple(pre), None, weights, biases, *names, planes.backward)  # type: ignore[arg-type]
    theirs = reference.backward(dy, tuple(pre), x, weights, biases, *names)  # type: ignore[arg-type]
    for own, other in zip(ours, theirs, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [2.0**50, 2.0**-100])
@pytest.mark.parametrize("which", range(4))
def test_numbers_without_planes(which: int, value: float) -> None:
    """What is derived is derived again where it is multiplied itself. Of several draws together,
    and with an exact activation: a few numbers are nearly all of a bias' gradient, or of y."""
    verdicts: list[list[Verdict]] = []
    for _ in range(20 if torch.get_default_device().type == "cuda" else 3):
        given: list[Any] = drawn((70, 33), "apart")
        given[which][3, 5] = value
        verdicts.append(judged(given, "apart", "relu", dy=torch.randn(70, 24)))
        dy = torch.randn(70, 24)
        dy[7, which] = value
        verdicts.append(judged(drawn((70, 33), "apart"), "apart", "relu", dy=dy))
    for of_one in (*zip(*verdicts[::2], strict=True), *zip(*verdicts[1::2], strict=True)):
        assert pooled(of_one).passed, str(of_one)


def test_infinities_come_out_where_pytorch_has_them() -> None:
    given: list[Any] = drawn((70, 33), "apart")
    given[0][5, 3], given[2][7], dy = float("inf"), 0, torch.randn(70, 24)
    x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:])
    found = []
    for by in (reference, planes):
        y, *pre = by.forward(x, weights, biases, "relu", "apart", True)
        names = "relu", "apart", ALL
        found.append([y, *pre, *by.backward(dy, tuple(pre), x, weights, biases, *names)])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
        finite = theirs.isfinite()
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-4, atol=1e-5)


def test_what_it_does_not_serve() -> None:
    def reason(
        piece: str = "forward", sizes: tuple[int, ...] = (32, 64, 48, 24), **how: Any
    ) -> Any:
        given: Any = {"dtype": "float32", "device": "cuda", "precision": "highest", **how}
        return planes.reason_not(problem(piece, *sizes, **given))

    assert reason() is None
    assert reason("backward", order="gate_up", w="strided") is None
    assert "so few" in reason(sizes=(32, 7, 48, 24))
    assert "float32" in reason(dtype="bfloat16")
    assert "float32" in reason(precision="high")
    assert "down" in reason(sizes=(32, 64, 48))
    assert "interleaved" in reason(order="interleaved")
    assert "2^29" in reason(sizes=(1 << 20, 64, 1 << 10, 24))
