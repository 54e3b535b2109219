"""linear → dropout in training: PyTorch's own random numbers, kept only where it is faster."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.dispatch import prices
from fastlinear.rewrite.rules.linear_dropout import dropout
from fastlinear.rewrite.site_outcome import SiteOutcome
from tests.rewrite.compiled_regions import torch_compile
from tests.rewrite.rewrite_models import Clock

pytestmark = pytest.mark.skipif(dropout.reason_not() is not None, reason=str(dropout.reason_not()))
X = torch.randn(64, 48)


class Block(nn.Module):
    """As in a transformer: two arguments, dropouts as a module and as a function."""

    def __init__(self, rate: float = 0.25) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48)
        self.drop, self.rate = nn.Dropout(0.1), rate

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        h = self.drop(self.act(self.fc1(x)))
        return residual + F.dropout(self.fc2(h), self.rate, self.training)


@pytest.fixture(autouse=True)
def known_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine the same: what dispatch takes for the linears decides their last digits."""
    monkeypatch.setattr(prices, "shipped", lambda _: prices.of_device("amd-zen5"))


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(48, 96), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(96, 64), nn.Identity(), nn.Dropout(0.5, inplace=True), nn.Linear(64, 32)),
    )


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


MODELS = {"sequential": (sequential, (X,), ("0", "3")), "block": (block, (X, X), ("fc1", "fc2"))}
MODEL = pytest.mark.parametrize("name", list(MODELS))


def optimized(model: nn.Module, inputs: tuple[Tensor, ...], mode: str = "train") -> fl.Result:
    config = fl.Config(mode=mode, tune=False, families=("linear_act",))
    return fl.optimize_(model, inputs, config=config)


def ours(result: fl.Result) -> dict[str, SiteOutcome]:
    return {s.fqn: s for s in result.sites if s.rule == "linear_dropout"}


def step(run: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output, every gradient, and the random numbers that come next."""
    torch.manual_seed(3)
    given = tuple(x.clone().requires_grad_() for x in inputs)
    y = run(*given)
    model.zero_grad()
    y.square().sum().backward()
    grads = [t.grad for t in (*given, *model.parameters())]
    assert all(g is not None for g in grads)
    return [y.detach(), *(g.clone() for g in grads if g is not None), torch.rand(3)]


def same(a: list[Tensor], b: list[Tensor], exactly: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@MODEL
def test_found_and_kept_with_the_same_numbers(name: str, clock: Clock) -> None:
    clock({"after": 50.0})
    make, inputs, linears = MODELS[name]
    model = make().train()
    expected = step(model, model, inputs)
    result = optimized(model, inputs)
    found = ours(result)
    assert tuple(found) == linears, result.table()
    assert {s.status for s in found.values()} == {"kept"}
    assert [s.activation for s in found.values()] == ["relu", "none"]
    assert {s.speedup for s in found.values()} == {2.0}
    told = [f for f in result.findings if f.code == "linear_dropout"]
    assert [(f.measured_us, f.predicted_gain_us) for f in told] == [(100.0, 50.0)] * 2
    assert not any(f.advice for f in told)
    assert all(f.message.endswith("optimize_ has put it in place.") for f in told)
    same(step(model, model, inputs), expected, exactly=True)
    torch.testing.assert_close(model.eval()(*inputs), make().eval()(*inputs))
    result.revert()
    assert not any("forward" in vars(m) for m in model.modules())
    same(step(model.train(), model, inputs), expected, exactly=True)


@MODEL
def test_not_kept_where_it_is_slower(name: str, clock: Clock) -> None:
    clock({"after": 200.0})
    make, inputs, _ = MODELS[name]
    model = make().train()
    result = optimized(model, inputs)
    assert not result.kept
    assert not ours(result)
    assert not any("forward" in vars(m) for m in model.modules())
    assert any("linear_dropout of" in note and "0.50x" in note for note in result.notes)


def test_a_profile_says_what_optimize_would_gain(clock: Clock) -> None:
    clock({"after": 50.0})
    report = fl.profile(block(), (X, X), mode="train")
    told = {f.details["linears"][0]: f for f in report.findings if f.code == "linear_dropout"}
    assert set(told) == {"fc1", "fc2"}
    assert told["fc1"].predicted_gain_us == 50.0
    assert told["fc1"].title == "linear → relu and dropout"
    assert told["fc1"].message.endswith("where the step gains.")


@MODEL
def test_evaluation_is_left_alone(name: str, clock: Clock) -> None:
    clock({"after": 50.0})
    make, inputs, _ = MODELS[name]
    result = optimized(make().eval(), inputs, "inference")
    assert not ours(result)
    assert "linear_dropout" not in json.dumps(result.to_json())


@MODEL
def test_a_plan_puts_it_back(name: str, clock: Clock, tmp_path: Path) -> None:
    clock({"after": 50.0})
    make, inputs, linears = MODELS[name]
    model = make().train()
    path = optimized(model, inputs).save(tmp_path / "plan.json")
    rewrites = json.loads(path.read_text())["rewrites"]
    assert [r["fqn"] for r in rewrites if r["rule"] == "linear_dropout"] == list(linears)
    other = make().train()
    expected = step(other, other, inputs)
    applied = fl.apply_(other, path, inputs)
    assert tuple(ours(applied)) == linears
    same(step(other, other, inputs), expected, exactly=True)
    applied.revert()
    assert not any("forward" in vars(m) for m in other.modules())


def _rate(model: nn.Module) -> None:
    model.drop.p = 0.9  # type: ignore[union-attr]


def _function_rate(model: nn.Module) -> None:
    model.rate = 0.9  # type: ignore[assignment]


def _asleep(model: nn.Module) -> None:
    model.drop.eval()  # type: ignore[operator,union-attr]


def _replaced(model: nn.Module) -> None:
    model.drop = nn.AlphaDropout(0.5)


def _hooked_dropout(model: nn.Module) -> None:
    model.drop.register_forward_hook(lambda *_: 2 * _[-1])  # type: ignore[operator,union-attr]


def _hooked_linear(model: nn.Module) -> None:
    model.fc2.register_forward_hook(lambda *_: 2 * _[-1])  # type: ignore[operator,union-attr]


EDITS = (_rate, _function_rate, _asleep, _replaced, _hooked_dropout, _hooked_linear)


@pytest.mark.parametrize("edit", EDITS)
def test_later_edits_count(edit: Callable[[nn.Module], None], clock: Clock) -> None:
    clock({"after": 50.0})
    model, plain = block().train(), block().train()
    assert len(ours(optimized(model, (X, X)))) == 2
    before = step(model, model, (X, X))
    edit(model)
    edit(plain)
    after = step(model, model, (X, X))
    same(after, step(plain, plain, (X, X)), exactly=True)
    assert not torch.equal(after[0], before[0])


@MODEL
def test_checkpoints_copies_and_compilation(name: str, clock: Clock) -> None:
    clock({"after": 50.0})
    make, inputs, _ = MODELS[name]
    model = make().train()
    expected = step(model, model, inputs)
    optimized(model, inputs)
    copied = copy.deepcopy(model)
    same(step(copied, copied, inputs), expected, exactly=True)
    for reentrant in (False, True):

        def checkpointed(*given: Tensor, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(model, *given, use_reentrant=reentrant)  # type: ignore[no-any-return]

        same(step(checkpointed, model, inputs), expected, exactly=True)
    torch._dynamo.reset()
    compiled = torch_compile(model, backend="eager", fullgraph=True)
    same(step(compiled, model, inputs), expected, exactly=False)


def test_hooked_modules_are_not_found(clock: Clock) -> None:
    clock({"after": 50.0})
    model = block().train()
    model.drop.register_forward_hook(lambda *_: None)  # type: ignore[operator,union-attr]
    assert tuple(ours(optimized(model, (X, X)))) == ("fc2",)


def test_it_lies_beside_chains_and_pairs_in_one_forward(clock: Clock) -> None:
    clock({"after": 50.0})
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 32)),
    ).train()
    expected = step(model, model, (X,))
    result = fl.optimize_(model, X, config=fl.Config(mode="train", tune=False))
    assert ours(result), result.table()
    same(step(model, model, (X,)), expected, exactly=False)
    result.revert()


@pytest.mark.parametrize("shape", [(3,), (64, 96), (5, 7, 128)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1 / 3])
@pytest.mark.parametrize("over", [False, True])
def test_dropout_is_pytorchs_bit_for_bit(shape: tuple[int, ...], rate: float, over: bool) -> None:
    """Not finite numbers, signs of zeros and second derivatives as well."""
    x = torch.randn(shape)
    x.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0])
    found = []
    for run in (lambda y: dropout.dropped(y, rate, over), lambda y: F.dropout(y, rate)):
        torch.manual_seed(1)
        torch.rand(5)
        leaf = x.clone().requires_grad_()
        z = run(leaf * 2.0)
        scale = torch.full_like(x, 3.0, requires_grad=True)
        (dx,) = torch.autograd.grad(z, leaf, scale, create_graph=True)
        (again,) = torch.autograd.grad(dx, scale, torch.ones_like(dx))
        found.append([z.detach(), dx.detach(), again, torch.rand(3)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        assert torch.equal(torch.signbit(a), torch.signbit(b))


def test_who_watches_sees_pytorchs_dropout() -> None:
    from torch.func import grad, vmap

    y = torch.randn(64, 64)
    torch.manual_seed(0)
    expected = F.dropout(y, 0.5)
    torch.manual_seed(0)
    assert torch.equal(
        grad(lambda t: dropout.dropped(t * 1.0, 0.5, True).sum())(y) != 0, expected != 0
    )
    vmap(lambda t: dropout.dropped(t * 1.0, 0.5, True), randomness="different")(y)
    traced = torch.jit.trace(lambda t: dropout.dropped(t * 1.0, 0.5, True), y, check_trace=False)
    assert "dropout" in str(traced.graph)


def test_a_batch_of_gradients() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    z = dropout.dropped(x * 1.0, 0.5, True)
    dz = torch.randn(3, 64, 64)
    (dx,) = torch.autograd.grad(z, x, dz, is_grads_batched=True, retain_graph=True)
    (one,) = torch.autograd.grad(z, x, dz[1])
    assert torch.equal(dx[1], one)
