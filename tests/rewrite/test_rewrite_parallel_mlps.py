"""Sequentials side by side: layer i of all of them as one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.dispatch import tune
from fastlinear.families.grouped.unequal.op import explain
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.rules.grouped.parallel_mlps import find as grouped_parallel_mlps
from fastlinear.rewrite.rules.grouped.parallel_mlps import forward as parallel_mlps_forward
from tests.rewrite.grouped_models import FAST, optimized, same_results

pytestmark = pytest.mark.usefixtures("prices_of_one_processor")

FAMILY = ("grouped_linear",)
(_CHOICE,) = explain([torch.ones(2, 8)] * 2, [torch.ones(8, 8)] * 2).choices
TOGETHER = _CHOICE.backend.name == "together"


def tower(k: int = 8, h: int = 6, n: int = 5, act: Any = nn.ReLU, bias: bool = True) -> Any:
    return nn.Sequential(nn.Linear(k, h, bias), act(), nn.Linear(h, h), act(), nn.Linear(h, n))


class Critics(nn.Module):
    """Towers of one input, an in-place activation in each, concatenated."""

    def __init__(self, act: Any = lambda: nn.ReLU(inplace=True)) -> None:
        super().__init__()
        self.critics = nn.ModuleList(tower(act=act) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([critic(x) for critic in self.critics], -1)


class Listed(Critics):
    """The same, handed back as they are."""

    def forward(self, x: Tensor) -> Any:
        return [critic(x) for critic in self.critics]


class Channels(nn.Module):
    """Each its own input, by index; stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Identity(), nn.Linear(6, 5, bias=False))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([t(x[:, i]) for i, t in enumerate(self.towers)], 1)


class Looped(nn.Module):
    """A loop over the parts of a tensor, summed by a generator; nested Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 24)
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU())  # noqa: E731
        self.towers = nn.ModuleDict(
            {n: nn.Sequential(block(), block(), nn.Linear(8, 5)) for n in "abc"}
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).chunk(3, -1)
        return sum(self.towers[n](part) for n, part in zip("abc", parts, strict=True))


class Mixed(nn.Module):
    """Inputs made between the calls, outputs used and written between them, sizes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = tower(8), tower(10), tower(8, n=7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = F.relu_(self.one(x))
        b = self.two(torch.cat([x, torch.tanh(y)], -1))
        b *= a
        return torch.cat([a, b, self.three(x * 2.0)], -1)


class Stages(nn.Module):
    """Towers whose results other towers of the same sizes go on with."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.ModuleList(tower(8, 6, 8) for _ in range(3))
        self.high = nn.ModuleList(tower(8, 6, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(high(low(x)) for low, high in zip(self.low, self.high, strict=True))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "critics": (Critics, (9, 8), 12),
    "listed": (Listed, (9, 8), 12),
    "tokens": (Critics, (2, 5, 8), 12),
    "channels": (Channels, (9, 3, 8), 6),
    "looped": (Looped, (9, 6), 9),
    "stages": (Stages, (9, 8), 18),
    **({"mixed": (Mixed, ((9, 8), (9, 2)), 9)} if TOGETHER else {}),
}


def drawn(shape: Any) -> Any:
    return torch.randn(shape) if isinstance(shape[0], int) else tuple(map(torch.randn, shape))


def agree(ours: nn.Module, theirs: nn.Module, given: Any) -> None:
    """Outputs and all gradients are the same."""
    given = given if isinstance(given, tuple) else (given,)
    flat: list[Tensor] = []
    for model in (ours, theirs):
        own = [x.clone().requires_grad_() for x in given]
        y = model(*own)
        y = torch.cat(y, -1) if isinstance(y, list) else y
        y.square().sum().backward()
        flat.append(torch.cat([t.flatten() for t in (y.detach(), *(x.grad for x in own))]))
    torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=name)
        a.grad = b.grad = None


def layers_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of towers that rewritten forwards compute at once from here on."""
    seen: list[int] = []
    real = parallel_mlps_forward.layered

    def layered(xs: Any, *rest: Any) -> Any:
        seen.append(len(xs))
        return real(xs, *rest)

    monkeypatch.setattr(parallel_mlps_forward, "layered", layered)
    return seen


@pytest.fixture(params=[parallel_mlps_forward.LISTS, parallel_mlps_forward.STACKED])
def kind(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a layer."""
    if request.param == parallel_mlps_forward.STACKED:
        monkeypatch.setattr(grouped_parallel_mlps, "_together", lambda *_: False)
    elif not TOGETHER:
        pytest.skip("unequal_linear has no kernels for this processor")
    return str(request.param)


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_layer_by_layer_one_call(
    name: str, mode: str, kind: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    make, shape, linears = CASES[name]
    if (name, kind) == ("mixed", parallel_mlps_forward.STACKED):
        linears = 0  # linears of different sizes do not stack
    model, x = make().train(mode == "train"), drawn(shape)
    plain = copy.deepcopy(model)
    loss = {"loss_fn": lambda y: sum(t.square().mean() for t in y)} if name == "listed" else {}
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, families=FAMILY)
    result = fl.optimize_(model, x, config=config, **loss)
    kept = [s for s in result.sites if s.status == "kept"]
    assert len(kept) == linears, result.table() + str(result.notes)
    if not linears:
        assert "different sizes" in str(result.findings)
        return
    assert all((s.rule, s.route) == ("grouped_linear", "chain") for s in kept)
    assert all("parallel MLPs of" in s.reason for s in kept)
    if kind == parallel_mlps_forward.LISTS:
        assert {s.backends["forward"] for s in kept} == {"together"}
    seen = layers_seen(monkeypatch)
    agree(model, plain, x)
    assert seen, "the rewritten forward is the one that runs"
    with torch.no_grad():  # parameters are read at each call
        for m in (model, plain):
            for p in m.parameters():
                p.data.mul_(1.5)
    agree(model, plain, x)
    assert list(model.state_dict()) == list(plain.state_dict())
    stored = result.plan.to_json()
    result.revert()
    assert all("forward" not in vars(m) for m in model.modules())
    again = fl.apply_(model, stored, x, **loss)
    assert sum(s.status == "kept" for s in again.sites) == linears
    agree(model, plain, x)


def test_towers_win_over_chains_of_their_own(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tower is a chain of mlp as well: what is faster is kept."""
    clock({**FAST, "before": 200.0, "layers": 100.0})
    model, x = Critics().eval(), torch.randn(9, 8)
    result = optimized(model, x)
    assert {s.rule for s in result.sites if s.status == "kept"} == {"grouped_linear"}
    stored = result.plan.to_json()
    result.revert()
    assert fl.apply_(model, stored, x).kept == 12
    clock({**FAST, "before": 200.0, "layers": 20.0})
    other = optimized(Critics().eval(), x)
    assert "grouped_linear" not in {s.rule for s in other.sites if s.status == "kept"}
    assert any("rewritten without it" in note for note in other.notes)


@pytest.mark.parametrize(("step", "alone", "kept"), [(50.0, 20.0, True), (200.0, 500.0, False)])
def test_rivals_are_decided_on_the_whole_step(
    step: float, alone: float, kept: bool, clock: Any
) -> None:
    """By themselves towers and chains find their weights in the caches: the step decides."""
    clock({**FAST, "before": 200.0, "layers": alone, "step": step})
    result = optimized(Critics().eval(), torch.randn(9, 8))
    assert ({s.rule for s in result.sites if s.status == "kept"} == {"grouped_linear"}) is kept
    said = any("the whole step is 0.50x" in note for note in result.notes)
    assert said is not kept


def test_all_chains_of_a_kind_are_weighed_together(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastlinear.core.timing import Samples
    from fastlinear.rewrite.evaluate import chains, measure, of_the_step

    clock({**FAST, "onednn": 50.0, "whole_cpp": 20.0, "layerwise": 20.0, "before": 200.0})
    monkeypatch.setattr(chains, "on_the_step", of_the_step.on_the_step)
    weighed: list[tuple[int, int]] = []

    def pair(model: Any, swaps: Any, *_: Any, against: Any, **__: Any) -> Any:
        weighed.append((len(against.swaps), len(swaps.swaps)))
        us = [Samples(n, (t,) * 5, "wall", 1, "clock") for n, t in (("b", 60.0), ("a", 50.0))]
        return measure.Pair(*us)

    monkeypatch.setattr(measure, "model_pair", pair)
    optimized(Critics().eval(), torch.randn(9, 8))
    swapped = [after for _, after in weighed]
    assert swapped[:2] == [4, 1]  # a chain a tower against linears, all side by side against these
    assert weighed[1][0] == 4


def test_a_filled_cache_offers_the_same_candidates(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tuned before, in doubt or not, takes no rival out of the comparison."""
    clock({**FAST, "whole_cpp": 20.0, "layerwise": 20.0, "before": 200.0, "step": 50.0})
    x, found = torch.randn(9, 8), []
    for doubt in ("the machine was busy", "", ""):
        monkeypatch.setattr(tune, "doubt_of", lambda *_, said=doubt: said)
        result = optimized(Critics().eval(), x)
        found.append({(s.fqn, s.rule) for s in result.sites if s.status == "kept"})
    assert found[0] == found[1] == found[2]
    assert {rule for _, rule in found[0]} == {"grouped_linear"}


def test_frozen_towers_and_layers_stay_without_gradients(kind: str, clock: Any) -> None:
    clock(FAST)
    model, x = Listed().train(), torch.randn(9, 8)
    model.critics[1].requires_grad_(False)
    model.critics[2][0].requires_grad_(False)
    plain = copy.deepcopy(model)
    config = fl.Config(mode="train", draws=1, optimizer_steps=1, families=FAMILY)
    loss = lambda y: sum(t.square().mean() for t in y)  # noqa: E731
    assert fl.optimize_(model, x, config=config, loss_fn=loss).kept == 12
    ys = model(x)
    assert [y.requires_grad for y in ys] == [True, False, True, True]
    for y in ys:
        y.add_(1.0)  # each writable by itself
    agree(model, plain, x)


def test_a_changed_tower_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = Critics().eval(), torch.randn(9, 8)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == 12
    seen = layers_seen(monkeypatch)

    def agrees(calls: int) -> None:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
        assert len(seen) == calls

    agrees(1)
    double = lambda _, __, y: 2 * y  # noqa: E731
    for path in ("critics.1", "critics.1.0", "critics.2.1"):  # a tower, a linear, an activation
        hooks = [m.get_submodule(path).register_forward_hook(double) for m in (model, plain)]
        agrees(1)
        for hook in hooks:
            hook.remove()
    agrees(2)
    for m in (model, plain):
        m.critics[0][3] = nn.Tanh()
    agrees(2)
    for m in (model, plain):
        m.critics[0][3] = nn.ReLU(inplace=True)
        m.critics[3].append(nn.Softmax(-1))
    agrees(2)
    for m in (model, plain):
        m.critics[3].pop(5)
        m.critics.append(m.critics[0])
    agrees(2)
    for m in (model, plain):
        m.critics.pop(4)
    agrees(3)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :7])
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.double())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(x).any()


class Waiting(Critics):
    """Each tower reads what the one before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList(tower(8, 6, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for critic in self.critics:
            x = x + critic(x)
        return x


class Written(Critics):
    """Their input is written to between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.critics[0](x)
        x.mul_(2.0)
        return y + self.critics[1](x)


class Drawing(Critics):
    """What the second reads is drawn behind the first."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.critics[0](x)
        return y + self.critics[1](F.dropout(x, 0.5, True))


class Between(Critics):
    """What the second reads is made by a layer behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.critics[0](x)
        return y + self.critics[1](self.between(x))


class Crossed(nn.Module):
    """Two pairs that wait for each other: only one of them can be at once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = tower(8, 6, 8), tower(8, 6, 8)
        self.c, self.d = tower(8, 7, 8), tower(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.a(x)) + self.b(self.c(x))


@pytest.mark.parametrize("make", [Waiting, Written, Drawing, Between])
def test_towers_that_must_not_be_moved_are_left_alone(make: Any, clock: Any) -> None:
    clock(FAST)
    model = make().train()
    result = optimized(model, torch.randn(9, 8), families=FAMILY)
    assert result.kept == 0
    assert "forward" not in vars(model)


def test_pairs_that_wait_for_each_other(clock: Any) -> None:
    clock(FAST)
    model, x = Crossed().train(), torch.randn(9, 8)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train", families=FAMILY).kept == 6
    same_results(model, plain, x)


class Normed(nn.Module):
    """What stands in them is no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([t(x) for t in self.towers])


class Branching(Critics):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() < 1e9 else -x)


class Tied(Critics):
    def __init__(self) -> None:
        super().__init__()
        self.critics[1][2] = self.critics[0][2]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Normed, "'1' (LayerNorm) is no activation behind a linear"),
        (Branching, "cannot trace"),
        (Tied, "'critics.1.2' is left alone itself"),
        (Between, "'between', a module that runs between them, makes what one reads"),
    ],
)
def test_what_is_not_rewritten_is_told_with_its_reason(make: Any, why: str, clock: Any) -> None:
    clock({"after": 40.0})
    result = optimized(make().eval(), torch.randn(9, 8), families=FAMILY)
    assert result.kept == 0
    told = [f.message for f in result.findings if f.code == "grouped_linear"]
    assert [text for text in told if why in text], told


def test_a_filter_leaves_them_alone(clock: Any) -> None:
    clock({"after": 40.0})
    config = fl.Config(tune=False, families=FAMILY)
    left = lambda _, fqn: fqn != "critics.2.2"  # noqa: E731
    result = fl.optimize_(Critics(), torch.randn(9, 8), config=config, filter_fn=left)
    assert result.kept == 0
    (told,) = [f.message for f in result.findings if f.code == "grouped_linear"]
    assert "'critics.2.2' is left alone itself" in told


def test_a_wrong_call_is_not_kept(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    for name in ("unequal_linear", "grouped_linear"):
        real = getattr(parallel_mlps_forward, name)

        def wrong(*given: Any, real: Any = real, **how: Any) -> Any:
            y = real(*given, **how)
            return [t * 1.001 for t in y] if isinstance(y, list) else y * 1.001

        monkeypatch.setattr(parallel_mlps_forward, name, wrong)
    result = optimized(Critics().eval(), torch.randn(9, 8), families=FAMILY)
    assert result.kept == 0
    assert any("less accurate" in note for note in result.notes)


def test_a_slower_call_is_not_kept(clock: Any) -> None:
    clock({"after": 150.0})
    result = optimized(Critics().eval(), torch.randn(9, 8), families=FAMILY)
    assert result.kept == 0
    assert any("one call is" in note for note in result.notes)


def test_sides_of_kinks_are_those_of_the_model(clock: Any) -> None:
    from fastlinear.rewrite.verify.kinks import Sides

    clock(FAST)
    model, x = Critics().train(), torch.randn(50, 8)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train", families=FAMILY).kept == 12
    outputs = []
    for m in (model, plain):
        with Sides() as sides:
            m(x)
        outputs.append(sides.outputs)
    assert len(outputs[0]) == 8
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_forced_backend_is_asked(clock: Any) -> None:
    clock(FAST)
    how: dict[str, Any] = {"families": FAMILY, "backends": {"grouped_linear": "baddbmm"}}
    result = optimized(Critics().eval(), torch.randn(9, 8), **how)
    assert {s.backends["forward"] for s in result.sites} == {"baddbmm"}


@pytest.mark.parametrize("name", ["critics", "channels", "looped"])
def test_compiled_autocast_and_functional_calls(name: str, kind: str, clock: Any) -> None:
    clock(FAST)
    make, shape, linears = CASES[name]
    model, x = make().eval(), drawn(shape)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == linears
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), plain(x), rtol=2e-5, atol=2e-5)
    torch.compiler.reset()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    state = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
    ours, theirs = (torch.func.functional_call(m, state, (x,)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_there_was_no_time_to_measure_is_told(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No finding vanishes because the budget is spent."""
    clock({"after": 40.0})
    monkeypatch.setattr(measure.Budget, "left_s", 0.0)

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers, self.scale = Critics(), nn.Parameter(torch.ones(20))
            self.conv = nn.Conv1d(12, 18, 1, groups=3)

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.towers(x) * self.scale)
            return y.sum() + self.conv(x.flatten()[:24].view(1, 12, 2))

    config = fl.Config(tune=False, time_budget_s=3.0)
    left = lambda *_: False  # noqa: E731
    result = fl.optimize_(Some().eval(), torch.randn(9, 8), config=config, filter_fn=left)
    spent = {f.code: f for f in result.findings if "time budget of 3 s was spent" in f.message}
    assert set(spent) >= {"grouped_linear", "diagonal_linear"}
    for f in spent.values():
        assert f.predicted_gain_us == f.measured_us == 0.0
        assert "not measured" in f.message
    result.to_json()
    result.table()
