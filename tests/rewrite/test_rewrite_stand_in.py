"""A rewritten forward stands in for its class's own, whatever route put it there."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.rewrite.swap.compiled_forward import CompiledForward, with_compiled
from fastlinear.rewrite.swap.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.swap.stand_in import KEYS
from tests.rewrite.rewrite_models import Clock
from tests.rewrite.route_models import (
    CLOCK,
    ROUTES,
    WrittenChain,
    X,
    lists_together,
    optimized,
    rewritten,
    swapped,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.usefixtures("graphs_run_eagerly", "tape"),
]


def seeded(model: Any, *args: Tensor, **kwargs: Tensor) -> Any:
    """One call with the random numbers that every such call draws."""
    torch.manual_seed(0)
    return model(*args, **kwargs)


def run(model: nn.Module, x: Tensor) -> Any:
    """The same without gradients."""
    with torch.no_grad():
        return seeded(model, x)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, clock: Clock) -> str:
    clock(CLOCK)
    return str(request.param)


def test_signature_documentation_and_keywords(route: str) -> None:
    plain, model = rewritten(route).plain, rewritten(route).model
    for name in swapped(model):
        ours, theirs = model.get_submodule(name).forward, plain.get_submodule(name).forward
        assert inspect.signature(ours) == inspect.signature(theirs)
        if route != "chain made by torch.fx":  # made of no file
            assert inspect.getsource(ours) == inspect.getsource(theirs)
        if not isinstance(ours, CompiledForward | GraphForward):
            assert ours.__doc__ == theirs.__doc__
            assert inspect.getfullargspec(ours) == inspect.getfullargspec(theirs)
    first, *_ = inspect.signature(plain.forward).parameters
    with torch.no_grad():
        torch.testing.assert_close(seeded(model, **{first: X}), seeded(plain, **{first: X}))
        with pytest.raises(TypeError):
            model(X, no_such_argument=1)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes(route: str, strict: bool) -> None:
    plain, model = rewritten(route).plain, rewritten(route).model
    first, *_ = inspect.signature(plain.forward).parameters
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    shapes: Any = {first: rows} if strict else (rows,)
    x = torch.randn(9, 16)
    made = torch.export.export(model, (X,), dynamic_shapes=shapes, strict=strict)
    torch.testing.assert_close(seeded(made.module(), x), seeded(plain, x))


@pytest.mark.parametrize(
    ("name", "family", "backend"),
    [
        ("pair in a forward", "linear_act", "onednn"),
        ("chain in a forward", "mlp", "layerwise"),
        ("gated module", "gated_mlp", "onednn"),
        ("stacked weights", "grouped_linear", "cpp"),
        ("towers", "grouped_linear", "cpp"),
    ],
)
def test_export_leaves_out_a_forced_backend(
    name: str, family: str, backend: str, clock: Clock
) -> None:
    clock(CLOCK)
    model = ROUTES[name].make().eval()
    plain = copy.deepcopy(model)
    config = fl.Config(draws=1, families=(family,), backends={family: backend})
    assert fl.optimize_(model, X, config=config).kept
    torch.testing.assert_close(run(model, X), run(plain, X))
    made = torch.export.export(model, (X,), strict=False)
    torch.testing.assert_close(made.module()(X), plain(X))


def test_torchscript_refuses_by_name_and_traces(route: str) -> None:
    plain, model = rewritten(route).plain, rewritten(route).model
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script: .*revert\(\)"):
        torch.jit.script(model)
    x = torch.randn(6, 16)
    with torch.no_grad():
        traced = torch.jit.trace(model, (X,))
        torch.testing.assert_close(seeded(traced, x), seeded(plain, x))


def test_a_pickle_is_that_of_the_model_before(route: str) -> None:
    plain, model, result = (getattr(rewritten(route), n) for n in ("plain", "model", "result"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert not any(set(KEYS) & set(vars(m)) for m in other.modules())
        torch.testing.assert_close(run(other, X), run(plain, X))
    again, _ = optimized(other, route)
    assert told(again) == told(result)
    assert swapped(other) == swapped(model)
    again.revert()
    with lists_together():
        planned = fl.apply_(other, result.plan.to_json(), X)
    assert (planned.kept, swapped(other)) == (result.kept, swapped(model))


def told(result: Any) -> list[tuple[Any, ...]]:
    return [(s.fqn, s.status, s.code, s.rule, s.route) for s in result.sites]


def test_copies_are_rewritten_with_weights_of_their_own(route: str) -> None:
    plain, model = rewritten(route).plain, rewritten(route).model
    other = copy.deepcopy(model)
    if not isinstance(model, torch.fx.GraphModule):  # which copies itself without its attributes
        assert swapped(other) == swapped(model)
    for name in swapped(other):
        module = other.get_submodule(name)
        assert all(vars(module)[key].__self__ is module for key in KEYS)
    torch.testing.assert_close(run(model, X), run(plain, X))
    zeros = copy.deepcopy(plain)
    with torch.no_grad():
        for p in (*other.parameters(), *zeros.parameters()):
            p.zero_()
    torch.testing.assert_close(run(other, X), run(zeros, X))
    torch.testing.assert_close(run(model, X), run(plain, X))
    shallow = copy.copy(model)
    assert not set(KEYS) & set(vars(shallow))


class Reduced(WrittenChain):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return restored, (dict(vars(self)),)


class Stated(WrittenChain):
    """Says what of it is pickled, and copied."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pickled": True}


def restored(state: dict[str, Any]) -> Reduced:
    made = Reduced()
    made.__dict__.update(state)
    return made


@pytest.mark.parametrize("kind", [Reduced, Stated])
def test_classes_that_say_how_they_are_pickled(kind: Any, clock: Clock) -> None:
    clock(CLOCK)
    model = kind().eval()
    expected = run(model, X)
    optimized(model, "chain in a forward")
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert hasattr(other, "pickled") == (kind is Stated)
        torch.testing.assert_close(run(other, X), expected)
    assert swapped(pickle.loads(pickle.dumps(model))) == []
    assert swapped(copy.deepcopy(model)) == [""]


def test_a_copy_inside_a_circle() -> None:
    """A child that holds its parent finds the copied one."""
    model = WrittenChain().eval()
    vars(model.a)["parent"] = model
    swaps = SwapSet(with_graph((), model))
    swaps.on()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other.a)["parent"] is other


@pytest.mark.parametrize("how", [with_graph, with_compiled])
def test_switching_on_and_off_leaves_nothing(how: Any) -> None:
    model = WrittenChain()
    before = pickle.dumps(model)
    more = {} if how is with_graph else {"mode": "default"}
    swaps = SwapSet(how((), model, **more))
    swaps.on()
    assert pickle.dumps(model) == before
    swaps.off()
    assert not set(KEYS) & set(vars(model))
