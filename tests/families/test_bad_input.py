"""Bad input of every family: our error, said by name, in eager mode and through torch.compile."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import FastlinearError

X, W, STACK = torch.ones(4, 3), torch.ones(5, 3), torch.ones(2, 5, 3)
WIDE, SIZES = torch.ones(4, 6), torch.tensor([2, 2])
SPARSE = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
}


def _quiet(made: Any) -> Any:
    def of(t: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Tensor = made(t)
            return found

    return of


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


@pytest.mark.parametrize("kind", SPARSE)
def test_tensors_without_strides_are_named(kind: str) -> None:
    made = _quiet(SPARSE[kind])
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: fl.grouped_linear(made(WIDE), STACK), "x to be a dense tensor"),
        (lambda: fl.ragged_linear(made(X), STACK, SIZES), "x to be a dense tensor"),
    ]
    if kind == "coo":
        few = torch.ones(2, 5).to_sparse()
        cases += [
            (lambda: fl.grouped_linear(WIDE, made(STACK)), "weight to be a dense tensor"),
            (lambda: fl.grouped_linear(WIDE, STACK, few), "bias to be a dense tensor"),
            (lambda: fl.ragged_linear(X, made(STACK), SIZES), "weight to be a dense tensor"),
            (lambda: fl.ragged_linear(X, STACK, made(SIZES)), "group_sizes to be a dense"),
            (lambda: fl.ragged_linear(X, STACK, SIZES, few), "bias to be a dense tensor"),
            (lambda: fl.unequal_linear([X], [W], [made(torch.ones(5))]), "bias 0 to be a dense"),
        ]
    for call, said in cases:
        with pytest.raises(fl.InputError, match=f"{said}.*layout torch"):
            call()


def test_nested_tensors_are_named() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: fl.grouped_linear(nested(), STACK),
        lambda: fl.grouped_linear(nested(), STACK, layout="... k"),
        lambda: fl.grouped_linear(WIDE, nested()),
        lambda: fl.ragged_linear(nested(), STACK, SIZES),
        lambda: fl.ragged_linear(X, nested(), SIZES),
        lambda: fl.unequal_linear([nested()], [W]),
        lambda: fl.unequal_linear(nested(), [W, W]),
    ]
    for call in calls:
        with pytest.raises(fl.InputError, match="nested tensor"):
            call()


def test_sparse_weights_that_linears_take_are_taken() -> None:
    (y,) = fl.unequal_linear([X], [W.to_sparse()])
    torch.testing.assert_close(y, X @ W.t())


@pytest.mark.parametrize("given", [None, 3, "ab", {"a": X}, {1}, torch.tensor(1.0)])
def test_lists_are_asked_for(given: Any) -> None:
    said = "to be a list or tuple of tensors"
    with pytest.raises(fl.InputError, match=f"xs {said}"):
        fl.unequal_linear(given, [W])
    with pytest.raises(fl.InputError, match=f"weights {said}"):
        fl.unequal_linear([X], given)
    if given is not None:
        with pytest.raises(fl.InputError, match=f"biases {said}"):
            fl.unequal_linear([X], [W], given)
    with pytest.raises(fl.InputError, match="layer"):
        fl.nn.GroupedLinear.from_linears(given)
    with pytest.raises(fl.InputError, match="to be a tensor"):
        fl.ragged_linear(X, STACK, given if not isinstance(given, Tensor) else None)


def test_what_is_no_tensor_in_a_list_is_named() -> None:
    for name, given in (
        ("input 1", ([X, None], [W, W])),
        ("weight 0", ([X, X], [None, W])),
        ("bias 1", ([X, X], [W, W], [None, 2.0])),
    ):
        with pytest.raises(fl.InputError, match=f"{name} to be a tensor"):
            fl.unequal_linear(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [nn.Linear(2, 3), nn.ModuleDict({"a": nn.Linear(2, 3)}), {"a": nn.Linear(2, 3)}]
)
def test_converters_say_what_holds_layers(given: Any) -> None:
    with pytest.raises(fl.InputError, match="or a list or tuple, of"):
        fl.nn.GroupedLinear.from_linears(given)


CALLS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "linear_act": (lambda x: fl.linear_act(x, W), WIDE),
    "linear_act activation": (lambda x: fl.linear_act(x, W, activation="rely"), X),
    "mlp": (lambda x: fl.mlp(x, [W, W]), WIDE),
    "mlp list": (lambda x: fl.mlp(x, []), X),
    "gated_mlp": (lambda x: fl.gated_mlp(x, W, W, torch.ones(2, 5)), WIDE),
    "gated_linear": (lambda x: fl.gated_linear(x, W, W), WIDE),
    "diagonal_linear": (lambda x: fl.diagonal_linear(x, torch.ones(5)), WIDE),
    "grouped_linear": (lambda x: fl.grouped_linear(x, STACK), X),
    "grouped_linear dtype": (lambda x: fl.grouped_linear(x, STACK), WIDE.half()),
    "grouped_linear layout": (lambda x: fl.grouped_linear(x, STACK, layout="zz"), WIDE),
    "grouped_linear shared": (lambda x: fl.grouped_linear(x, STACK, layout="... k"), WIDE),
    "ragged_linear": (lambda x: fl.ragged_linear(x, STACK, SIZES), WIDE),
    "experts": (
        lambda x: fl.experts(x, SIZES[:, None], torch.ones(2, 1), STACK, STACK[:, :, :1]),
        WIDE,
    ),
    "unequal_linear": (lambda x: fl.unequal_linear([x], [W]), WIDE),
    "unequal_linear list": (lambda x: fl.unequal_linear(None, [W]), WIDE),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_arrives_through_compile(name: str) -> None:
    """Outside of fullgraph as itself; under it inside Dynamo's, which knows no other way."""
    call, x = CALLS[name]
    with pytest.raises(fl.InputError) as eager:
        call(x)
    error = eager.value
    torch._dynamo.reset()
    with pytest.raises(fl.InputError) as apart:
        torch.compile(call, backend="eager")(x)
    assert str(apart.value) == str(error)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="InputError") as whole:
        torch.compile(call, backend="eager", fullgraph=True)(x)
    said = str(whole.value).replace("\\'", "'")
    for part in (error.function, error.expected, error.received):
        assert part in said
    torch._dynamo.reset()


def _kinds() -> list[type[FastlinearError]]:
    found: list[Any] = [FastlinearError]
    for kind in found:
        found += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__name__)
def test_errors_hold_their_parts_and_survive_pickling(kind: type[FastlinearError]) -> None:
    error = kind("f", "an x", "a y", "Take x.")
    assert str(error) == "f: expected an x; received a y. Take x."
    assert "__init__" not in vars(kind), "torch.compile could not follow it"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.function, again.expected, again.received, again.remedy) == error.args


GATE, DOWN, NUMBERS = torch.ones(5, 3), torch.ones(2, 5), torch.ones(3)
EVERY: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear_act": (fl.linear_act, (X, W, torch.ones(5))),
    "mlp": (lambda x, w, b: fl.mlp(x, [w], [b]), (X, W, torch.ones(5))),
    "grouped_linear": (fl.grouped_linear, (WIDE, STACK, torch.ones(2, 5))),
    "gated_linear": (fl.gated_linear, (X, GATE, GATE)),
    "gated_mlp": (fl.gated_mlp, (X, GATE, GATE, DOWN)),
    "diagonal_linear": (fl.diagonal_linear, (X, NUMBERS, NUMBERS)),
    "diagonal_linear with a residual": (
        lambda x, w, r: fl.diagonal_linear(x, w, residual=r),
        (X, NUMBERS, X),
    ),
    "diagonal_linear into memory": (
        lambda x, w, o: fl.diagonal_linear(x, w, out=o),
        (X, NUMBERS, torch.empty(4, 3)),
    ),
}
ODD: dict[str, Callable[[Tensor], Any]] = {
    **SPARSE,
    "csc": lambda t: t.to_sparse_csc(),
    "nested": lambda t: torch.nested.nested_tensor(list(t.unbind())),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
    "none": lambda _: None,
    "numpy": lambda t: t.numpy(),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", EVERY)
def test_every_operand_of_an_odd_kind_is_computed_or_named(name: str, kind: str) -> None:
    """Whatever one of the operands is: the right numbers, or our own error."""
    call, given = EVERY[name]
    right = call(*given).clone()
    odd, said = _quiet(ODD[kind]), list[str]()
    for i, t in enumerate(given):
        if kind in ("csr", "csc") and t.dim() == 1:
            continue
        mixed = (*given[:i], odd(t), *given[i + 1 :])
        try:
            y = _quiet(lambda given: call(*given))(mixed)
        except fl.InputError as error:
            said.append(str(error))
            continue
        if kind == "none":  # a bias, a residual or memory left out
            assert y.shape == right.shape
            continue
        assert kind not in ("quantized", "meta", "numpy")
        torch.testing.assert_close(y.to_dense() if y.layout is not torch.strided else y, right)
    if kind == "quantized":
        assert all("dequantize()" in s or "expected out of" in s for s in said)
        assert len(said) == len(given)


@pytest.mark.parametrize("name", EVERY)
def test_on_the_meta_device_shapes_come_back(name: str) -> None:
    call, given = EVERY[name]
    y = call(*(t.to("meta") for t in given))
    right = call(*given)
    assert (y.shape, y.dtype, y.device.type) == (right.shape, right.dtype, "meta")


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_where_tensors_belong(compiled: bool) -> None:
    """None for every tensor, the first a front end looks at included."""
    calls: list[Callable[[], Any]] = [
        lambda: fl.linear_act(None, None),
        lambda: fl.linear_act(None, W),
        lambda: fl.diagonal_linear(None, None),
        lambda: fl.diagonal_linear(None, None, out=X),
        lambda: fl.mlp(None, [W]),
        lambda: fl.grouped_linear(None, None),
        lambda: fl.gated_linear(None, W, W),
        lambda: fl.explain(None, None),
    ]
    for call in calls[:-1] if compiled else calls:
        run = torch.compile(call, backend="eager", fullgraph=False) if compiled else call
        with pytest.raises(FastlinearError, match="to be a tensor"):
            run()
