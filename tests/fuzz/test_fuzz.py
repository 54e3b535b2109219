"""A fixed number of the fuzzer's cases (``make fuzz`` runs new ones), and that it finds faults."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core import errors
from tests.fuzz import fuzz
from tests.fuzz.fuzz_calls import CALLS, LAYERS, OPS

_SEEDS = 24  # of each op: half a minute in all


def test_every_public_op_and_layer_is_called() -> None:
    """Found by their signatures: public functions and modules that take x, and return tensors."""
    public = {name: getattr(fl, name) for name in fl.__all__}
    takes_x = {
        name
        for name, f in public.items()
        if inspect.isfunction(f)
        and next(iter(inspect.signature(f).parameters), "") in ("x", "xs")
        and "Tensor" in str(inspect.signature(f).return_annotation)
    }
    assert set(OPS) == takes_x
    assert set(LAYERS) == set(fl.nn.__all__)


@pytest.mark.parametrize("op", CALLS)
def test_fixed_cases(op: str) -> None:
    pool = fuzz.Pool()
    failures = [told for seed in range(_SEEDS) if (told := fuzz.run(op, seed, pool))]
    assert not failures, "\n".join(failures)
    assert not pool.wrong()


def _failures(op: str, count: int = 40) -> list[str]:
    found = (fuzz.run(op, seed, fuzz.Pool()) for seed in range(count))
    return [told for told in found if told is not None]


def test_a_wrong_result_is_found_and_its_case_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fl.linear_act

    def off(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: object) -> Tensor:
        y = real(x, weight, bias, **how)  # type: ignore[arg-type]
        return y * 1.01 if x.dim() == 3 else y

    monkeypatch.setattr(fl, "linear_act", off)
    first = _failures("linear_act")[0]
    assert first.startswith("python -m tests.fuzz.fuzz --case linear_act ")
    assert "error" in first


def test_wrong_and_superfluous_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fl.unequal_linear

    class Zeros(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *ys: Tensor) -> tuple[Tensor, ...]:
            return tuple(y.clone() for y in ys)

        @staticmethod
        def backward(ctx: object, *dys: Tensor) -> tuple[Tensor, ...]:
            return dys  # zeros for results that are not used

    def off(*given: object, **how: object) -> list[Tensor]:
        return list(Zeros.apply(*real(*given, **how)))  # type: ignore[arg-type]

    monkeypatch.setattr(fl, "unequal_linear", off)
    assert any("PyTorch's None" in told for told in _failures("unequal_linear"))


def test_writing_to_a_given_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fl.diagonal_linear

    def off(x: Tensor, *given: object, **how: object) -> Tensor:
        y = real(x, *given, **how)  # type: ignore[arg-type]
        x.data.zero_()
        return y

    monkeypatch.setattr(fl, "diagonal_linear", off)
    assert any("x written to" in told for told in _failures("diagonal_linear"))


def test_errors_of_our_own_are_failures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> Tensor:
        raise errors.InputError("mlp", "a", "b", "c")

    monkeypatch.setattr(fl, "mlp", refuses)
    assert "InputError" in _failures("mlp", 1)[0]
