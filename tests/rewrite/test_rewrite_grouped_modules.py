"""Grouped convolutions, modules with weights of their own per group, and loops over linears:
rewritten as one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.report import page
from tests.rewrite.grouped_models import (
    FAST,
    ByEinsum,
    ByVmap,
    Convolutions,
    Loop,
    Multichannel,
    SlowGroups,
    Stack,
    optimized,
    same_results,
)
from tests.rewrite.rewrite_models import snapshot

CASES = {
    "convolutions": (Convolutions, (7, 12, 5), {"one", "two"}),
    "loop": (lambda: nn.Sequential(Loop(4, 8)), (9, 32), {f"0.projs.{i}" for i in range(4)}),
    "slow groups": (lambda: SlowGroups(32, 4), (2, 32, 9), {f"projs.{i}" for i in range(4)}),
    "stack": (lambda: nn.Sequential(Stack()), (2, 9, 3, 8), {f"0.a.{i}" for i in range(3)}),
    "bmm": (lambda: nn.Sequential(Multichannel()), (6, 9, 5), {"0"}),
    "turned": (lambda: nn.Sequential(Multichannel(True)), (6, 9, 5), {"0"}),
    "einsum": (lambda: nn.Sequential(ByEinsum()), (9, 3, 5), {"0"}),
    "vmap": (lambda: nn.Sequential(ByVmap()), (3, 9, 5), {"0"}),
}


def calls_of_grouped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts that rewritten modules call with from here on."""
    from fastlinear.rewrite.rules.grouped.modules import forward as grouped_forward

    seen: list[str] = []
    real = grouped_forward.call

    def call(*args: Any) -> Tensor:
        seen.append(args[4])
        return real(*args)

    monkeypatch.setattr(grouped_forward, "call", call)
    return seen


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_modules_become_one_call_each(
    name: str, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    make, shape, sites = CASES[name]
    model, x = make().train(mode == "train"), torch.randn(shape)
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimized(model, x, mode)
    kept = {s.fqn: s for s in result.sites if s.rule == "grouped_linear"}
    assert set(kept) == sites, result.table()
    assert all(s.status == "kept" and "in one call" in s.reason for s in kept.values())
    assert min(sites) in result.table(width=200)
    for f in result.findings:
        assert f.code != "grouped_linear" or "optimize_ has put it in place" in f.message
    assert "in one call" in page(result.to_json())
    seen = calls_of_grouped(monkeypatch)
    same_results(model, plain, x)
    assert seen, "the rewritten forward is the one that runs"
    with torch.no_grad():  # parameters are read at each call
        for m in (model, plain):
            for p in m.parameters():
                p.data.mul_(1.5)
    same_results(model, plain, torch.cat([x, x], 1) if name in ("bmm", "turned") else x)
    with torch.no_grad():
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            a.data = b.data = torch.randn_like(b)
    same_results(model, plain, x)
    model.load_state_dict(make().state_dict())
    plain.load_state_dict(model.state_dict())
    same_results(model, plain, x)
    stored = result.plan.to_json()
    assert sorted(r["fqn"] for r in stored["rewrites"]) == sorted(sites), "each once"
    result.revert()
    for m in (model, plain):
        m.zero_grad()
    assert [row[:3] for row in snapshot(model) if len(row) == 5] == [
        row[:3] for row in before if len(row) == 5
    ]
    assert list(model.state_dict()) == list(plain.state_dict())
    again = fl.apply_(model, stored, x)
    assert {s.fqn for s in again.sites if (s.rule, s.status) == ("grouped_linear", "kept")} == sites
    again.revert()
    assert all("forward" not in vars(m) for m in model.modules())


def test_an_optimizer_goes_on_with_the_modules_own_parameters(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Loop(4, 8)).train(), torch.randn(9, 32)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train").kept == 4
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_parameters_stay_without_gradients(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Loop(4, 8)).train(), torch.randn(9, 32)
    model[0].projs[1].weight.requires_grad_(False)
    model[0].projs[2].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train").kept == 4
    same_results(model, plain, x)


def test_a_changed_loop_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = nn.Sequential(Loop(4, 8)).eval(), torch.randn(9, 32)
    plain = copy.deepcopy(model)
    optimized(model, x)
    seen = calls_of_grouped(monkeypatch)

    def agrees(x: Tensor = x) -> None:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)

    agrees(torch.randn(3, 32))
    assert len(seen) == 1
    agrees(torch.randn(2, 3, 32))  # dimensions it was not seen with
    double = lambda _, __, y: 2 * y  # noqa: E731
    hooks = [m[0].projs[1].register_forward_hook(double) for m in (model, plain)]
    agrees()
    for hook in hooks:
        hook.remove()
    for m in (model, plain):  # a layer of another class, of another size, one layer more
        m[0].projs[2] = nn.Sequential(m[0].projs[2], nn.Tanh())
    agrees()
    for m in (model, plain):
        m[0].projs[2] = m[0].projs[2][0]
        m[0].projs[3] = nn.Linear(8, 5, bias=False)
        torch.nn.init.ones_(m[0].projs[3].weight)
    agrees()
    for m in (model, plain):
        m[0].projs[3] = nn.Linear(8, 8)
        torch.nn.init.ones_(m[0].projs[3].weight)
        torch.nn.init.ones_(m[0].projs[3].bias)
    assert len(seen) == 1
    agrees()
    assert len(seen) == 2, "a layer of the same kind is as good"
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        agrees()
    assert len(seen) == 2
    for m in (model, plain):
        m[0].projs.append(nn.Linear(8, 8))
        torch.nn.init.ones_(m[0].projs[4].weight)
        torch.nn.init.ones_(m[0].projs[4].bias)
    agrees(torch.randn(9, 40))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(torch.randn(9, 40)).any()


def test_a_changed_convolution_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = nn.Sequential(nn.Conv2d(12, 24, 1, groups=4)).eval(), torch.randn(2, 12, 5, 4)
    plain = copy.deepcopy(model)
    optimized(model, x)
    seen = calls_of_grouped(monkeypatch)
    torch.testing.assert_close(model[0](input=x), plain[0](x), rtol=1e-5, atol=1e-5)
    assert seen == ["b (g k) ..."]
    last = x.contiguous(memory_format=torch.channels_last)
    y = model(last)
    torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-5)
    assert y.stride() == plain(last).stride()
    assert seen[1:] == ["... (g k)"]
    torch.testing.assert_close(model(x[0]), plain(x[0]))  # one image, without a batch
    with pytest.raises(RuntimeError, match="channels"):
        model(x[:, :6])
    with pytest.raises(RuntimeError):
        model(x.double())
    for m in (model, plain):
        m[0].padding = (1, 1)
    torch.testing.assert_close(model(x), plain(x))
    for m in (model, plain):
        m[0].padding = (0, 0)
        torch.nn.utils.parametrizations.weight_norm(m[0])
    torch.testing.assert_close(model(x), plain(x))
    assert len(seen) == 2


class Moody(nn.Module):
    """Its forward reads an attribute, and drops in training."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 5))
        self.loud = False

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.einsum("bgk,gnk->bgn", x, self.w), 0.5, self.training)
        return y * 2 if self.loud else y


def test_what_the_forward_reads_is_watched(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Moody()).eval(), torch.randn(9, 3, 5)
    assert optimized(model, x).kept == 1
    quiet = model(x)
    model[0].loud = True
    torch.testing.assert_close(model(x), 2 * quiet)
    model[0].loud = False
    model.train()
    assert not torch.equal(model(x), model(x)), "it drops"
    awake = nn.Sequential(Moody()).train()
    assert optimized(awake, x, "train").kept == 0


class Branching(ByEinsum):
    """Another path for many rows, and for small numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return -y if x.shape[0] > 100 else y


class ByValue(ByEinsum):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().max() < 100 else x[..., :4]


class Fixed(ByEinsum):
    """Takes one number of rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgk,gnk->bgn", x.view(9, 3, 5), self.w)


@pytest.mark.parametrize("make", [Branching, ByValue])
def test_branches_on_the_input_are_left_alone(make: Any, clock: Any) -> None:
    clock(FAST)
    result = optimized(nn.Sequential(make()).eval(), torch.randn(9, 3, 5))
    assert result.kept == 0
    assert result.sites == ()


def test_one_shape_is_kept_to(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = nn.Sequential(Fixed()).eval(), torch.randn(9, 3, 5)
    assert optimized(model, x).kept == 1
    seen = calls_of_grouped(monkeypatch)
    model(x)
    assert len(seen) == 1
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 3, 5))


class Named(nn.Module):
    """Calls its layer by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Loop(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x)


class Aside(Named):
    """Calls a linear of its loop by itself as well."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.projs[0](x[..., :8]).sum()


class Again(Named):
    """Calls its loop twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


def test_a_linear_that_others_call_as_well_is_left_alone(clock: Any) -> None:
    clock(FAST)
    model = Aside().eval()
    result = optimized(model, torch.randn(9, 32), families=("grouped_linear",))
    assert result.kept == 0
    assert "forward" not in vars(model.inner)


def test_a_loop_called_by_keyword_is_right(clock: Any) -> None:
    """Its forward's trace takes the call as it is."""
    clock(FAST)
    model, x = Named().train(), torch.randn(9, 32)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train", families=("grouped_linear",)).kept == 4
    same_results(model, plain, x)
    torch.testing.assert_close(model.inner(x), plain.inner(x), rtol=1e-5, atol=1e-5)
    convolution = nn.Conv1d(12, 18, 1, groups=3).eval()
    result = optimized(convolution, {"input": torch.randn(7, 12, 5)})
    assert result.sites == ()


def test_a_module_called_twice_is_one_call_each_time(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = Again().train(), torch.randn(9, 32)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train").kept == 4
    seen = calls_of_grouped(monkeypatch)
    same_results(model, plain, x)
    assert len(seen) == 2


def test_hooks_are_left_alone(clock: Any) -> None:
    clock(FAST)
    loop = nn.Sequential(Loop(4, 8)).eval()
    loop[0].projs[1].register_forward_hook(lambda *_: None)
    assert optimized(loop, torch.randn(9, 32), families=("grouped_linear",)).kept == 0
    convolutions = Convolutions().eval()
    convolutions.one.register_forward_hook(lambda *_: None)
    result = optimized(convolutions, torch.randn(7, 12, 5))
    assert [s.fqn for s in result.sites] == ["two"]


def test_a_filter_and_other_families_leave_them_alone(clock: Any) -> None:
    clock(FAST)
    x = torch.randn(7, 12, 5)
    config = fl.Config(draws=1, tune=False)
    result = fl.optimize_(Convolutions(), x, config=config, filter_fn=lambda _, fqn: fqn == "two")
    assert [s.fqn for s in result.sites] == ["two"]
    assert optimized(Convolutions(), x, families=("linear_act",)).sites == ()


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_model_compiles_whole(name: str, clock: Any) -> None:
    clock(FAST)
    make, shape, sites = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    expected = model(x)
    assert optimized(model, x).kept == len(sites)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=2e-5, atol=2e-5)
    torch.compiler.reset()  # containers share one forward, whose compilations are counted


@pytest.mark.parametrize("name", ["convolutions", "loop", "einsum"])
def test_autocast_and_functional_calls_are_right(name: str, clock: Any) -> None:
    clock(FAST)
    make, shape, _ = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    plain = copy.deepcopy(model)
    optimized(model, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    state = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
    ours, theirs = (torch.func.functional_call(m, state, (x,)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_slower_call_is_not_kept(clock: Any) -> None:
    clock({**FAST, "after": 150.0})
    loop = optimized(nn.Sequential(Loop(4, 8)), torch.randn(9, 32), families=("grouped_linear",))
    assert loop.kept == 0
    assert any("one call is" in note for note in loop.notes)
    result = optimized(Convolutions(), torch.randn(7, 12, 5))
    assert {s.fqn: (s.status, s.code) for s in result.sites} == {
        "one": ("rejected", "slower"),
        "two": ("rejected", "slower"),
    }
    assert "2 grouped layers" in result.table()


@pytest.mark.parametrize("name", ["convolutions", "loop", "bmm"])
def test_a_wrong_call_is_not_kept(name: str, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification that the tests above rely on fails where the numbers are wrong."""
    from fastlinear.rewrite.rules.grouped.modules import forward as grouped_forward

    clock(FAST)
    for function in ("call", "grouped_linear"):  # the second where a function mode is on
        real = getattr(grouped_forward, function)
        wrong = lambda *a, real=real, **how: real(*a, **how) * 1.001  # noqa: E731
        monkeypatch.setattr(grouped_forward, function, wrong)
    make, shape, _ = CASES[name]
    result = optimized(make().eval(), torch.randn(shape), families=("grouped_linear",))
    assert result.kept == 0
    assert any("less accurate" in note for note in result.notes)


@pytest.mark.parametrize("name", ["conv", "loop", "bmm"])
def test_results_may_be_written_to(name: str, clock: Any) -> None:
    clock(FAST)
    layer, x = {
        "conv": (nn.Conv2d(12, 24, 1, groups=4), torch.randn(2, 12, 5, 4)),
        "loop": (Loop(4, 8), torch.randn(9, 32)),
        "bmm": (Multichannel(), torch.randn(6, 9, 5)),
    }[name]
    model = nn.Sequential(layer, nn.ReLU(inplace=True)).train()
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train", families=("grouped_linear",)).kept
    same_results(model, plain, x)


class Kinked(Multichannel):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.bmm(x, self.kernel.transpose(1, 2)) + self.shift)


def test_sides_of_a_kink_are_seen_in_one_call(clock: Any) -> None:
    """Rounding may put a pre-activation near 0 on either side; both are right."""
    from fastlinear.rewrite.verify.kinks import Sides

    clock(FAST)
    model, x = nn.Sequential(Kinked()).train(), torch.randn(6, 50, 5)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train").kept == 1
    with Sides() as sides:
        model(x)
    (seen,) = sides.outputs
    torch.testing.assert_close(seen, plain(x), rtol=1e-5, atol=1e-5)


def test_a_forced_backend_is_asked(clock: Any) -> None:
    clock(FAST)
    x = torch.randn(7, 12, 5)
    result = optimized(Convolutions(), x, backends={"grouped_linear": "baddbmm"})
    assert {s.backends["forward"] for s in result.sites} == {"baddbmm"}
    again = fl.apply_(Convolutions(), result.plan.to_json(), x)
    assert again.kept == 2
    with pytest.raises(fl.UnsupportedError, match="'triton' of grouped_linear"):
        optimized(Convolutions(), x, backends={"grouped_linear": "triton"})


def test_a_plan_for_another_model_is_refused(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Multichannel()), torch.randn(6, 9, 5)
    stored = optimized(model, x).plan.to_json()
    model = nn.Sequential(Multichannel())
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(fl.PlanError):
        fl.apply_(model, stored, x)
