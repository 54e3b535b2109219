"""A rewritten forward stands in for its class's own, whatever route put it there."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewrite_models import Clock, run
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.rewrite import finish
from fastlinear.rewrite.exchange.compiled_forward import CompiledForward, with_compiled
from fastlinear.rewrite.exchange.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.exchange.stand_in import KEYS
from fastlinear.rewrite.exchange.swap import SwapSet, is_rewritten
from fastlinear.rewrite.match.chain import Chain

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.usefixtures("graphs_run_eagerly", "tape"),
]
FASTER = dict.fromkeys(("onednn", "cpp", "whole_cpp", "pieces", "after", "together"), 50.0)


class Parts(nn.Module):
    """Layers for the forwards below, all of 8 features, whose argument is ``x`` of (M, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.several = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.act = nn.ReLU()


class Pair(Parts):
    """A linear and its activation, in one forward."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        """Layers one after the other."""
        return F.gelu(self.a(x)) * scale


class Run(Parts):
    """Linears that follow each other."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        """Layers one after the other."""
        return self.c(self.act(self.b(self.act(self.a(x))))) * scale


class Blocks(nn.Module):
    """Sequentials that follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """A gated MLP and nothing else."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PartlyGated(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Row(Parts):
    """Linears on one input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) + self.c(x)


class Loop(Parts):
    """A loop over chunks."""

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([x, x, x], -1).chunk(3, -1)
        return torch.cat([f(part) for f, part in zip(self.several, parts, strict=True)], -1)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], -1)


class Lists(nn.Module):
    """Linears of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ModuleList(nn.Linear(k, n) for k, n in ((3, 5), (4, 2), (1, 6)))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([3, 4, 1], -1)
        return torch.cat([f(part) for f, part in zip(self.several, parts, strict=True)], -1)


class Weights(nn.Module):
    """A weight per group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:  # (M, G, K)
        return torch.einsum("bgk,gnk->bgn", x, self.weight)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Weights()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.unflatten(-1, (2, 4)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 6, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[..., None]).squeeze(-1)


class OnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.w)), self.v)


def mlp_of_8() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def conv1d() -> nn.Module:
    """A layer of transformers, alone."""
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return nn.Sequential(kind(8, 8))


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(mlp_of_8())


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
ONE: dict[str, Any] = {"families": ("linear_act",), "tune": True}
CHAIN: dict[str, Any] = {"families": ("mlp",)}
GATED: dict[str, Any] = {"families": ("gated_mlp",), "tune": True}
GROUPED: dict[str, Any] = {"families": ("grouped_linear",)}
ROUTES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8)), ONE),
    "linear_in_sequential": (mlp_of_8, ONE),
    "linear_in_parent": (Pair, ONE),
    "conv1d": (conv1d, ONE),
    "chain_in_sequential": (mlp_of_8, CHAIN),
    "chain_in_parent": (Run, CHAIN),
    "chain_in_traced": (traced, CHAIN),
    "chain_of_blocks": (Blocks, CHAIN),
    "chain_on_parameters": (OnParameters, CHAIN),
    "gated": (Gated, GATED),
    "gated_part": (PartlyGated, GATED),
    "row": (Row, GROUPED),
    "loop": (Loop, GROUPED),
    "weights": (Grouped, GROUPED),
    "convolution": (Convolution, GROUPED),
    "towers": (Towers, GROUPED),
    "lists": (Lists, GROUPED),
    "graphed": (Run, {"families": (), "graphs": True}),
    "compiled": (Run, {"families": (), "compile": True}),
}


@cache
def rewritten(name: str) -> tuple[nn.Module, nn.Module, Any, list[type]]:
    """Of a route: the model before, the same one rewritten, the result, and the kinds of chains."""
    torch.manual_seed(0)
    make, how = ROUTES[name]
    model = make().eval()
    plain = copy.deepcopy(model)
    result, kinds = optimized(model, how)
    return plain, model, result, kinds


def optimized(model: nn.Module, how: dict[str, Any]) -> tuple[Any, list[type]]:
    kinds: list[type] = []
    real = finish.swaps_of

    def swaps_of(candidates: Any) -> Any:
        kinds.extend(type(c.chain) for c in candidates if c.chain is not None)
        return real(candidates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "swaps_of", swaps_of)
        config = fl.Config(**{"draws": 1, "tune": False, "time_budget_s": 600.0} | how)
        result = fl.optimize_(model, X, config=config)
    assert result.kept, result.table()
    return result, kinds


def exchanged(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if is_rewritten(m)]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, clock: Clock) -> str:
    clock(FASTER)
    return str(request.param)


def test_signature_documentation_and_keywords(route: str) -> None:
    plain, model, _, _ = rewritten(route)
    for name in exchanged(model):
        ours, theirs = model.get_submodule(name).forward, plain.get_submodule(name).forward
        assert inspect.signature(ours) == inspect.signature(theirs)
        if route != "chain_in_traced":  # made of no file
            assert inspect.getsource(ours) == inspect.getsource(theirs)
        if not isinstance(ours, CompiledForward | GraphForward):
            assert ours.__doc__ == theirs.__doc__
            assert inspect.getfullargspec(ours) == inspect.getfullargspec(theirs)
    first, *_ = inspect.signature(plain.forward).parameters
    with torch.no_grad():
        torch.testing.assert_close(model(**{first: X}), plain(**{first: X}))
        with pytest.raises(TypeError):
            model(X, no_such_argument=1)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes(route: str, strict: bool) -> None:
    plain, model, _, _ = rewritten(route)
    first, *_ = inspect.signature(plain.forward).parameters
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    shapes: Any = {first: rows} if strict else (rows,)
    x = torch.randn(9, 8)
    made = torch.export.export(model, (X,), dynamic_shapes=shapes, strict=strict)
    torch.testing.assert_close(made.module()(x), plain(x))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("linear_in_parent", "onednn"),
        ("chain_in_parent", "layerwise"),
        ("gated", "onednn"),
        ("weights", "cpp"),
        ("towers", "cpp"),
    ],
)
def test_export_leaves_out_a_forced_backend(name: str, backend: str, clock: Clock) -> None:
    clock(FASTER)
    make, how = ROUTES[name]
    (family,) = how["families"]
    model = make().eval()
    plain = copy.deepcopy(model)
    optimized(model, {**how, "backends": {family: backend}})
    torch.testing.assert_close(run(model, X), run(plain, X))
    made = torch.export.export(model, (X,), strict=False)
    torch.testing.assert_close(made.module()(X), plain(X))


def test_torchscript_refuses_by_name_and_traces(route: str) -> None:
    plain, model, _, _ = rewritten(route)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script: .*revert\(\)"):
        torch.jit.script(model)
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(model, (X,))(x), plain(x))


def test_a_pickle_is_that_of_the_model_before(route: str) -> None:
    plain, model, result, _ = rewritten(route)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert not any(set(KEYS) & set(vars(m)) for m in other.modules())
        torch.testing.assert_close(run(other, X), run(plain, X))
    again, _ = optimized(other, ROUTES[route][1])
    assert told(again) == told(result)
    assert exchanged(other) == exchanged(model)
    again.revert()
    planned = fl.apply_(other, result.plan.to_json(), X)
    assert (planned.kept, exchanged(other)) == (result.kept, exchanged(model))


def told(result: Any) -> list[tuple[Any, ...]]:
    return [(s.fqn, s.status, s.code, s.rule, s.route) for s in result.sites]


def test_copies_are_rewritten_with_weights_of_their_own(route: str) -> None:
    plain, model, _, _ = rewritten(route)
    other = copy.deepcopy(model)
    if not isinstance(model, torch.fx.GraphModule):  # which copies itself without its attributes
        assert exchanged(other) == exchanged(model)
    for name in exchanged(other):
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


def test_every_route_is_among_these(clock: Clock) -> None:
    """All functions that are made for an instance, and all kinds of chains."""
    clock(FASTER)
    forwards, kinds = set(), set()
    for name in ROUTES:
        _, model, _, of_chains = rewritten(name)
        kinds.update(of_chains)
        for module in exchanged(model):
            code = model.get_submodule(module).forward.__func__.__code__
            forwards.add((Path(code.co_filename).name, code.co_firstlineno))
    assert set(concrete(Chain)) <= kinds
    assert {(file, line) for file, line, maker in made_in_source() if maker != ORACLES} <= forwards


ORACLES = "float64_linear"
"""Makes forwards that compute what is expected, for no model that anybody gets."""


def concrete(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield from concrete(found)
        if not inspect.isabstract(found) and not found.__name__.startswith("_"):
            yield found


def made_in_source() -> Iterator[tuple[str, int, str]]:
    """File, line and maker of every function ``forward`` that another function makes."""
    (home,) = {Path(finish.__file__).parent}
    for file in home.rglob("*.py"):
        for outer in ast.walk(ast.parse(file.read_text())):
            if isinstance(outer, ast.FunctionDef):
                for inner in outer.body:
                    if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                        yield file.name, inner.lineno, outer.name


class Reduced(Run):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return restored, (dict(vars(self)),)


class Stated(Run):
    """Says what of it is pickled, and copied."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pickled": True}


def restored(state: dict[str, Any]) -> Reduced:
    made = Reduced()
    made.__dict__.update(state)
    return made


@pytest.mark.parametrize("kind", [Reduced, Stated])
def test_classes_that_say_how_they_are_pickled(kind: Any, clock: Clock) -> None:
    clock(FASTER)
    model = kind().eval()
    expected = run(model, X)
    optimized(model, CHAIN)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert hasattr(other, "pickled") == (kind is Stated)
        torch.testing.assert_close(run(other, X), expected)
    assert exchanged(pickle.loads(pickle.dumps(model))) == []
    assert exchanged(copy.deepcopy(model)) == [""]


def test_a_copy_inside_a_circle() -> None:
    """A child that holds its parent finds the copied one."""
    model = Run().eval()
    vars(model.a)["parent"] = model
    swaps = SwapSet(with_graph((), model))
    swaps.on()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other.a)["parent"] is other


@pytest.mark.parametrize("how", [with_graph, with_compiled])
def test_switching_on_and_off_leaves_nothing(how: Any) -> None:
    model = Run()
    before = pickle.dumps(model)
    more = {} if how is with_graph else {"mode": "default"}
    swaps = SwapSet(how((), model, **more))
    swaps.on()
    assert pickle.dumps(model) == before
    swaps.off()
    assert not set(KEYS) & set(vars(model))
