"""Gradients behind a kink: another side within rounding is right, a wrong derivative is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastlinear.core.settings import Config
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import cache
from fastlinear.families.linear import linear_act, reference
from fastlinear.families.mlp import reference as chain
from fastlinear.rewrite import optimize_
from fastlinear.rewrite.evaluate import site
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.swap.sequential_forward import Segment, sequential_forward
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify import running
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.kinks import Following, Sides, UnlikeRuns, following
from fastlinear.rewrite.verify.oracle import make_oracle
from fastlinear.rewrite.verify.running import Ran, Runner, run_once
from tests.rewrite.rewrite_models import Clock, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
MINE = Config(
    mode="train",
    tune=False,
    draws=2,
    families=("linear_act",),
    backends={"linear_act": "mine"},
)
TRAIN = Runner("train", None, torch.device("cpu"), 0)


def reversed_forward(x: Tensor, w: Tensor, b: Tensor, activation: str, save_pre: bool) -> Any:
    """A correct forward that adds up in another order."""
    return reference.forward(
        x.flip(1).contiguous(), w.flip(1).contiguous(), b, activation, save_pre
    )


def right(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    return reference.grad_pre(dy, saved, activation, db)


def dropped_mask(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    return dy, dy.sum(0)


def wrong_near_0(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    dpre = dy * (saved > 0.01)
    return dpre, dpre.sum(0)


def wrong_bias(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    dpre, grad = reference.grad_pre(dy, saved, activation, db)
    return dpre, grad * 1.01


def scaled(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    dpre, grad = reference.grad_pre(dy, saved, activation, db)
    return dpre * 1.01, grad * 1.01


def slightly_scaled(dy: Tensor, saved: Tensor, activation: str, db: bool) -> Any:
    dpre, grad = reference.grad_pre(dy, saved, activation, db)
    return dpre * (1 + 1e-5), grad


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``backward(f)``: linear_act adds up in reverse, and f is its ``grad_pre``."""
    known = registry.family("linear_act")

    def backend(piece: str, name: str) -> registry.Backend:
        return registry.Backend(known.name, piece, "mine", f"{__name__}:{name}", lambda _: None)

    def use(function: Any) -> None:
        extra = backend("forward", "reversed_forward"), backend("grad_pre", function.__name__)
        others = sorted(known.backends, key=lambda b: b.name != "pieces")
        facts = {"backends": (*extra, *others), "cpu_work": None}
        monkeypatch.setitem(
            registry._FAMILIES, known.name, registry.Family(**{**vars(known), **facts})
        )
        cache.forget()

    return use


def at_the_kink(activation: nn.Module) -> nn.Sequential:
    """A model whose first row has pre-activations that are 0 but for rounding, in every unit."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), activation, nn.Linear(32, 4))
    with torch.no_grad():
        model[0].bias.copy_(-F.linear(X[:1], model[0].weight)[0])
    return model


def swaps(model: nn.Sequential, activation: str) -> SwapSet:
    (pair,) = Segment.pairs(model, model[0], model[1], activation)
    return SwapSet([Swap("", model, sequential_forward([(pair, "mine")], model))])


def judge(model: nn.Module, runner: Runner = TRAIN) -> verify.Judge:
    call = Call((X,), {})
    ran = run_once(model, call, runner)
    oracle, exact = make_oracle(model, runner, call, ran)
    return verify.Judge(
        model, runner, call, draws=2, oracle=oracle, seconds=30, ran=ran, exact=exact
    )


def failed(verdicts: Any) -> set[str]:
    return {v.name for v in verdicts if not v.passed}


def strictly(_: Any, ours: Ran, known: Any, *__: Any) -> Any:
    """The rule without a look at the run's own sides."""
    return verify.compare_all(ours.results, known.theirs.results, known.oracle)


def test_large_outputs_of_activations_are_computed_again(
    backward: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    backward(right)
    clock({"after": 50.0})
    monkeypatch.setattr(running, "KEEP_BYTES", 1)
    monkeypatch.setattr(verify, "KEEP_BYTES", 1)
    model = at_the_kink(nn.ReLU())
    call = Call((X,), {})
    ran = running.check_runs("test", model, call, TRAIN)
    assert (ran.sides, ran.whole) == ((), False)
    assert make_oracle(model, TRAIN, call, ran)[1] is None
    result = optimize_(model, X, config=MINE)
    assert result.sites[0].status == "kept", result.sites[0].reason


MODULES = [
    (nn.ReLU(), "relu"),
    (nn.ReLU(inplace=True), "relu"),
    (nn.LeakyReLU(0.01), "leaky_relu"),
]


@pytest.mark.parametrize(("module", "name"), MODULES)
def test_the_other_side_within_rounding_passes(
    backward: Any, monkeypatch: pytest.MonkeyPatch, module: nn.Module, name: str
) -> None:
    backward(right)
    model = at_the_kink(module)
    pre = F.linear(X, model[0].weight, model[0].bias)
    ours = reversed_forward(X, model[0].weight, model[0].bias, "none", False)[0]
    assert ((pre > 0) != (ours > 0)).any()
    assert (pre[0].abs() < 1e-6).all()
    found = judge(model)
    assert not failed(found.verdicts(swaps(model, name)))
    assert not failed(found.trajectory(swaps(model, name), 2))
    with monkeypatch.context() as m:
        m.setattr(verify.Judge, "_compared", strictly)
        assert "grad.0.bias" in failed(judge(model).verdicts(swaps(model, name)))
        stepped = failed(judge(model).trajectory(swaps(model, name), 2))
        assert "optimizer steps: 0.bias" in stepped


@pytest.mark.parametrize(("module", "name"), MODULES)
@pytest.mark.parametrize("wrong", [dropped_mask, wrong_near_0, wrong_bias, scaled, slightly_scaled])
def test_a_wrong_backward_fails_beside_the_kink(
    backward: Any, module: nn.Module, name: str, wrong: Any
) -> None:
    backward(wrong)
    model = at_the_kink(module)
    which = "grad.0.weight" if wrong is slightly_scaled else "grad.0.bias"
    assert which in failed(judge(model).verdicts(swaps(model, name)))


@pytest.mark.parametrize(("module", "name"), [(nn.GELU(), "gelu"), (nn.Tanh(), "tanh")])
def test_smooth_activations_keep_the_strict_rule(
    backward: Any, monkeypatch: pytest.MonkeyPatch, module: nn.Module, name: str
) -> None:
    monkeypatch.setattr(Following, "__init__", lambda *_: pytest.fail("nothing to follow"))
    backward(right)
    model = at_the_kink(module)
    assert not failed(judge(model).verdicts(swaps(model, name)))
    backward(slightly_scaled)
    assert "grad.0.weight" in failed(judge(model).verdicts(swaps(model, name)))


@pytest.mark.parametrize("wrong", [None, wrong_bias])
def test_optimize_keeps_a_right_backend_and_rejects_a_wrong_one(
    backward: Any, clock: Clock, wrong: Any
) -> None:
    clock({"after": 50.0})
    backward(wrong or right)
    model = at_the_kink(nn.ReLU())
    result = optimize_(model, X, config=MINE)
    if wrong is None:
        assert result.sites[0].status == "kept", result.sites[0].reason
        assert result.sites[0].activation == "relu"
    else:
        assert result.sites[0].code == "less_accurate"


class InForward(nn.Module):
    """The same, its activation a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        made = at_the_kink(nn.Identity())
        self.fc, self.out = made[0], made[2]
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self.fc(x)))


def clamped(x: Tensor) -> Tensor:
    return x.clamp(min=0)


@pytest.mark.parametrize("function", [F.relu, torch.relu, clamped, F.leaky_relu])
def test_functions_in_a_parents_forward(backward: Any, clock: Clock, function: Any) -> None:
    clock({"after": 50.0})
    backward(right)
    model = InForward(function)
    result = optimize_(model, X, config=MINE)
    assert result.sites[0].route == "parent"
    assert result.sites[0].status == "kept", result.sites[0].reason


def test_one_site_alone_is_judged_on_its_own_side(
    backward: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    backward(right)
    seen: list[Any] = []
    failure = site.failure

    def noted(candidate: Any) -> Any:
        seen.append(failure(candidate))
        with monkeypatch.context() as m:
            m.setattr(site, "following", lambda t, o, f, *_: following(t, t, f) if o is t else None)
            seen.append(failure(candidate))
        return seen[0]

    monkeypatch.setattr(site, "failure", noted)
    optimize_(at_the_kink(nn.ReLU()), X, config=MINE, filter_fn=lambda _, fqn: fqn == "0")
    assert seen[0] is None
    assert seen[1].name in ("0.dW", "0.db", "0.dx")


@pytest.mark.parametrize("inplace", [False, True])
def test_following_changes_sides_where_allowed_and_values_nowhere(inplace: bool) -> None:
    pre = torch.tensor([1e-9, -1e-9, 0.0, 0.5, -0.5, -1e-9], dtype=torch.float64)
    torchs = torch.tensor([0.0, 0.0, 0.0, 0.5 + 1e-8, 0.0, 0.0])
    own = torch.tensor([0.0, 1e-9, 1e-9, 0.0, 0.5, 0.0])  # the fourth and fifth are plain wrong
    leaf = pre.clone().requires_grad_()
    with Following([torchs], [own]):
        y = F.relu(leaf * 1, inplace=inplace)
    assert torch.equal(y.detach(), F.relu(pre))
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert grad.tolist() == [0, 1, 1, 1, 0, 0]


def test_runs_that_differ_are_not_followed() -> None:
    x = torch.randn(3, 4)
    with Sides() as sides:
        F.relu(linear_act(x, torch.eye(4)))
    assert len(sides.outputs) == 1
    for other in (lambda: F.relu(x[:2]), lambda: None, lambda: (F.relu(x), F.relu(x))):
        with pytest.raises(UnlikeRuns), Following(sides.outputs, sides.outputs):
            other()
    with Following(sides.outputs, sides.outputs):
        F.relu(x.double())


def test_a_clamp_at_exactly_0_passes_the_gradient_on() -> None:
    zero = torch.zeros(3)
    with Sides() as sides:
        torch.clamp(zero, min=0)
        F.relu(zero)
        torch.clamp(zero, -1, 1)
    assert [bool((t > 0).all()) for t in sides.outputs] == [True, False]


def test_a_fused_call_is_seen_whole(backward: Any) -> None:
    backward(right)
    model = at_the_kink(nn.ReLU()).eval()
    with Sides() as before:
        run(model, X)
    swapped = swaps(model, "relu")
    swapped.on()
    with Sides() as after:
        run(model, X)
    assert len(before.outputs) == len(after.outputs) == 1
    torch.testing.assert_close(before.outputs[0], after.outputs[0])


@pytest.mark.parametrize("backend", [None, "eager", "layerwise"])
@pytest.mark.parametrize("final", ["none", "relu"])
def test_every_layer_of_a_chain_in_one_call_is_seen(backend: str | None, final: str) -> None:
    torch.manual_seed(4)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    with Sides() as before:
        y = F.relu(layers[1](F.relu(layers[0](X))))
        y = layers[2](y)
        y = F.relu(y) if final == "relu" else y
    weights, biases = [m.weight for m in layers], [m.bias for m in layers]
    for given in (X, X[None]):
        with Sides() as after:
            ours = forwards.call_mlp(given, weights, biases, "relu", final, backend)
        torch.testing.assert_close(ours.reshape(y.shape), y)
        assert len(after.outputs) == len(before.outputs) == (3 if final == "relu" else 2)
        for a, b in zip(after.outputs, before.outputs, strict=True):
            torch.testing.assert_close(a, b.reshape(*given.shape[:-1], 64))
    with Sides() as smooth:
        forwards.call_mlp(X, weights, biases, "gelu", "none", backend)
    assert not smooth.outputs


def layerwise(x: Tensor, weights: Any, biases: Any, *names: Any) -> Any:
    """A correct chain whose first layer adds up in another order."""
    first, rest = weights[0].flip(1).contiguous(), weights[1:]
    return chain.forward(x.flip(1).contiguous(), (first, *rest), biases, *names)


def test_a_chain_in_one_call_is_judged_on_its_own_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.family("mlp")
    target = f"{__name__}:layerwise"
    mine = registry.Backend(known.name, "forward", "mine", target, lambda _: None)
    changed = {**vars(known), "backends": (*known.backends, mine)}
    monkeypatch.setitem(registry._FAMILIES, known.name, registry.Family(**changed))
    cache.forget()
    model = nn.Sequential(*at_the_kink(nn.ReLU()), nn.ReLU(), nn.Linear(4, 4))
    linears = [m for m in model if isinstance(m, nn.Linear)]

    def forward(self: nn.Sequential, x: Tensor) -> Tensor:
        layers: list[Any] = [m for m in self if isinstance(m, nn.Linear)]
        parameters = [m.weight for m in layers], [m.bias for m in layers]
        return forwards.call_mlp(x, *parameters, "relu", "none", "mine")

    assert len(linears) == 3
    swap = SwapSet([Swap("", model, forward)])
    assert not failed(judge(model).verdicts(swap))
    assert not failed(judge(model).trajectory(swap, 2))
    with monkeypatch.context() as m:
        m.setattr(verify.Judge, "_compared", strictly)
        assert "grad.0.bias" in failed(judge(model).verdicts(swap))
    cache.forget()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = at_the_kink(nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)


def test_activations_run_again_by_checkpointing_keep_the_oracles_sides(backward: Any) -> None:
    backward(right)
    model = Checkpointed()
    found = judge(model).verdicts(swaps(model.part, "relu"))
    assert all(v.torch_error < 1.0 for v in found)
    backward(dropped_mask)
    assert "grad.part.0.bias" in failed(judge(model).verdicts(swaps(model.part, "relu")))
