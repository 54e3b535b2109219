"""Linears written on parameters in a forward: ``F.linear`` and the like."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.function_mode import KnowingMode
from fastlinear.rewrite.evaluate import chains, site
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.rewrite_models import Clock, run, snapshot, statuses

optimizing = importlib.import_module("fastlinear.rewrite.optimize")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


class Held(nn.Module):
    """Parameters for the forwards below; every width is 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.b1, self.w2, self.b2 = (parameter(*s) for s in ((6, 6), (6,)) * 2)
        self.w3, self.b3 = parameter(6, 6), parameter(6)
        self.ws = nn.ParameterList(parameter(6, 6) for _ in range(3))
        self.bs = nn.ParameterList(parameter(6) for _ in range(3))
        self.named = nn.ParameterDict({"up": parameter(6, 6), "down": parameter(6, 6)})
        self.fc, self.act, self.drop = nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5)


class Functions(Held):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.w1, self.b1))
        x = F.relu(F.linear(x, self.w2, bias=self.b2))
        return F.linear(x, self.w3)


class Loop(Held):
    def forward(self, x: Tensor) -> Tensor:
        for w, b in zip(self.ws, self.bs, strict=True):
            x = F.silu(F.linear(x, w, b))
        return x


class Counting(Held):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.ws)):
            x = F.linear(x, self.ws[i], self.bs[i])
            if i < len(self.ws) - 1:
                x = F.relu(x)
        return x


class Dict(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.named["up"])), self.named["down"])


class Products(Held):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.w1.t() + self.b1)
        x = torch.relu(torch.addmm(self.b2, x, self.w2.T))
        return self.b3 + torch.matmul(x, self.w3.transpose(0, 1))


class Turned(Held):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.w1 + self.b1)
        x = torch.tanh(torch.addmm(self.b2, x, self.w2))
        return F.linear(x, self.w3.t(), self.b3)


class Mixed(Held):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc(self.drop(self.act(F.linear(x, self.w1, self.b1)))))
        return F.linear(x, self.w2, self.b2)


class Dotted(Held):
    """The weight of a layer that is not called."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.fc.weight, self.fc.bias)), self.w1)


class Asking(Held):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x.to(self.w1.dtype), self.w1, self.b1))
        return F.linear(x, self.w2).view(-1, self.w2.shape[0])


class Dense(nn.Module):
    """A layer of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = parameter(6, 6), parameter(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kernel, self.bias)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Dense() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Dense(), nn.ReLU(), Dense(), nn.ReLU(), nn.Linear(6, 6))


Names = tuple[tuple[str, ...], str, str]
FORWARDS: dict[Any, Names] = {
    Functions: (("w1", "w2", "w3"), "relu", "none"),
    Loop: (("ws.0", "ws.1", "ws.2"), "silu", "silu"),
    Counting: (("ws.0", "ws.1", "ws.2"), "relu", "none"),
    Dict: (("named.up", "named.down"), "relu", "none"),
    Products: (("w1", "w2", "w3"), "relu", "none"),
    Turned: (("w1", "w2", "w3"), "tanh", "none"),
    Mixed: (("w1", "fc", "w2"), "gelu", "none"),
    Dotted: (("fc.weight", "w1"), "relu", "none"),
    Asking: (("w1", "w2"), "relu", "none"),
    Blocks: (tuple(f"layers.{i}.kernel" for i in range(3)), "relu", "relu"),
    sequence: (("0.kernel", "2.kernel", "4"), "relu", "none"),
}


def matched(model: nn.Module, x: Any = X, mode: str = "inference") -> list[Any]:
    work = optimizing.prepare("test", model, x, fl.Config(mode=mode), None, lambda *_: None)
    candidates, _ = optimizing.watch(work, x, None)
    with optimizing.preserved(model, mode):
        return chains.match(work, candidates, ("mlp",))


def rewritten(model: nn.Module, found: list[Any]) -> SwapSet:
    """The model with these chains, of which there are some, and nothing else, swapped."""
    assert found
    swaps = SwapSet(swaps_of([c for chain in found for c in chains.members(chain)]))
    swaps.on()
    return swaps


class Counted(KnowingMode):
    """Notes every call of mlp and linear_act."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (forwards.mlp, forwards.linear_act, F.linear):
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_chain_is_found_and_computes_the_same(kind: Any, mode: str) -> None:
    model = kind().train(mode == "train")
    if kind is Mixed and mode == "train":
        assert [c.names for c in matched(model, mode=mode)] == [("fc", "w2")]
        model.drop.p = 0.0  # drops nothing
    other, before = copy.deepcopy(model), snapshot(model)
    found = matched(model, mode=mode)
    named = ((c.names, c.problems[0].option) for c in found)
    assert [(n, of("activation"), of("final")) for n, of in named] == [FORWARDS[kind]]
    (chain,) = found
    assert site.failure(chain) is None
    torch.testing.assert_close(chain.before(X), chain.after(X))
    torch.testing.assert_close(chain.layers(X, {c.fqn: c for c in chain.members}), chain.after(X))
    swaps = rewritten(model, found)
    with Counted() as counted:
        ours = model(X)
    assert counted.calls == ["mlp"]
    theirs = other(X)
    torch.testing.assert_close(ours, theirs)
    for y in (ours, theirs):
        y.square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)
    model.zero_grad()
    swaps.revert()
    assert snapshot(model) == before


def grown(m: Any) -> None:
    m.ws.append(parameter(6, 6))
    m.bs.append(parameter(6))


CHANGES: dict[str, Any] = {
    "in place": lambda m: nn.init.normal_(m.ws[1]),
    "through .data": lambda m: m.ws[1].data.mul_(2.0),
    "an optimizer's step": lambda m: step(m),
    "load_state_dict": lambda m: m.load_state_dict(Counting().double().float().state_dict()),
    "another parameter": lambda m: m.ws.__setitem__(1, parameter(6, 6)),
    "another dtype": lambda m: m.double(),
    "a subclass": lambda m: m.ws.__setitem__(1, nn.Parameter(Doubled(m.ws[1].data))),
    "a longer list": grown,
    "a parametrization": lambda m: nn.utils.parametrize.register_parametrization(
        m.ws, "1", nn.ReLU()
    ),
}


class Doubled(Tensor):
    """Doubles what it is multiplied by."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y * 2 if func is F.linear else y


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_those_of_now(change: str) -> None:
    model = Counting().eval()
    other = copy.deepcopy(model)
    swaps = rewritten(model, matched(model))
    for m in (model, other):
        torch.manual_seed(1)
        CHANGES[change](m)
    x = X.double() if change == "another dtype" else X
    torch.testing.assert_close(model(x), other(x))
    assert list(model.state_dict()) == list(other.state_dict())
    swaps.revert()
    torch.testing.assert_close(model(x), other(x))


def test_a_copy_reads_its_own_parameters() -> None:
    model = Functions().eval()
    rewritten(model, matched(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.w2.zero_()
    y = model(X)
    assert not torch.equal(y, other(X))
    torch.testing.assert_close(y, Functions.forward(model, X))
    state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    assert not torch.func.functional_call(model, state, (X,)).any()


@pytest.mark.parametrize("kind", [Products, Functions])
def test_under_autocast_the_sum_of_a_product_keeps_its_dtype(kind: Any) -> None:
    model = kind().eval()
    other = copy.deepcopy(model)
    rewritten(model, matched(model))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = model(X), other(X)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


class Activated(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.linear(x, self.w1, self.b1)) + x


class Alone(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w1, self.b1) * 2


@pytest.mark.parametrize("kind", [Activated, Alone])
def test_a_single_one_is_one_call(kind: Any, fast: None) -> None:
    model = kind().eval()
    expected, before = run(model, X), snapshot(model)
    result = fl.optimize_(model, X)
    assert [(s.fqn, s.status, s.route, s.rule) for s in result.sites if s.fqn != "fc"] == [
        ("w1", "kept", "parent", "linear_act")
    ]
    with Counted() as counted:
        torch.testing.assert_close(run(model, X), expected)
    assert counted.calls == ["linear_act"]
    result.revert()
    assert snapshot(model) == before


SAVED = [(kind, mode) for kind in (Functions, Loop, Blocks) for mode in ("inference", "train")]


@pytest.mark.parametrize(("kind", "mode"), [*SAVED, (Mixed, "inference")])
def test_optimize_save_apply_revert(
    kind: Any, mode: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"layerwise": 40.0, "whole_cpp": 40.0, "pieces": 40.0, "after": 50.0})
    model = kind().train(mode == "train")
    before, expected = snapshot(model), copy.deepcopy(model)
    result = fl.optimize_(model, X, config=fl.Config(mode=mode, draws=2, optimizer_steps=2))
    routes = {s.fqn: s.route for s in result.sites if s.status == "kept"}
    assert routes == dict.fromkeys(FORWARDS[kind][0], "chain"), result.table()
    with Counted() as counted:
        ours = run(model, X)
    assert counted.calls == ["mlp"]
    torch.testing.assert_close(ours, run(expected, X))
    assert list(model.state_dict()) == list(expected.state_dict())
    plan = json.loads(json.dumps(result.plan.to_json()))
    result.revert()
    assert snapshot(model) == before
    again = fl.apply_(model, plan)
    assert {s.fqn: s.route for s in again.sites if s.status == "kept"} == routes
    again.revert()
    assert snapshot(model) == before


class Twice(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.w1)), self.w1)


class ReadElsewhere(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w1) + self.w1.sum()


class Written(Held):
    """What is multiplied by changes meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.linear(x, self.w1))
        return F.linear(y, self.w2) + self.w2.mul(2.0).sum()


class Branches(Held):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.linear(x, self.w1))
        return y if y.sum() > 0 else -y


class Deep(nn.Module):
    """A list inside another module, whose length nothing watches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Held()

    def forward(self, x: Tensor) -> Tensor:
        for w in self.inner.ws:
            x = F.relu(F.linear(x, w))
        return x


LEFT: dict[Any, dict[str, tuple[str, str]]] = {
    Twice: {"w1": ("several_users", "more than once")},
    ReadElsewhere: {"w1": ("not_shown", "read elsewhere")},
    Written: {"w2": ("not_shown", "read elsewhere")},
    Branches: {"w1": ("untraceable", "cannot trace")},
    Deep: {f"inner.ws.{i}": ("not_shown", "read elsewhere") for i in range(3)},
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_alone_is_told_with_a_remedy(kind: Any, fast: None) -> None:
    model = kind().eval()
    result = fl.optimize_(model, X)
    told = {s.fqn: s for s in result.sites}
    for name, (code, words) in LEFT[kind].items():
        assert (told[name].status, told[name].code) == ("refused", code), told[name]
        assert words in told[name].reason
        assert "fl.nn.MLP" in told[name].reason
    result.revert()


def test_filter_fn_and_a_hook_keep_their_say(fast: None) -> None:
    seen: list[tuple[type, str]] = []

    def no(module: nn.Module, fqn: str) -> bool:
        seen.append((type(module), fqn))
        return False

    model = Functions().eval()
    result = fl.optimize_(model, X, filter_fn=no)
    assert statuses(result)["w1"] == "refused"
    assert (Functions, "w1") in seen
    model.register_forward_hook(lambda *_: None)
    result = fl.optimize_(model, X)
    assert {s.code for s in result.sites if s.fqn.startswith("w")} == {"hooks"}


def test_the_profile_lists_them() -> None:
    sites = {s.fqn: s for s in fl.profile(Functions().eval(), X).sites}
    assert set(sites) == {"fc", "w1", "w2", "w3"}
    one = sites["w2"]
    assert (one.code, one.parent_fqn, one.in_features, one.out_features) == (
        *("on_parameters", ""),
        *(6, 6),
    )
    assert (one.calls, one.rows, one.bias, sites["w3"].bias) == (1, 3, True, False)


def test_layers_of_fastlinear_and_torch_are_no_such_sites() -> None:
    model = nn.Sequential(fl.nn.GatedMLP(6, 8), nn.TransformerEncoderLayer(6, 2, 8)).eval()
    assert "on_parameters" not in {s.code for s in fl.profile(model, X).sites}


class Drops(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(F.linear(self.drop(F.gelu(x @ self.w2.t())), self.w1, self.b1)))


def test_where_no_copy_can_judge_products_are_judged_in_float64(fast: None) -> None:
    torch.manual_seed(0)
    result = fl.optimize_(Drops().train(), X, config=fl.Config(mode="train", draws=2))
    assert any("float64 linears" in note for note in result.notes)
    assert "kept" in {statuses(result)[name] for name in ("w1", "w2")}, result.table()
    errors = {v.name: v.torch_error for v in result.verdicts}
    assert max(errors.values()) > 0.0
