"""Loops over linears of any sizes: rewritten as one call of unequal_linear."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules.grouped.lists import forward as list_forward
from fastlinear.rewrite.rules.grouped.parallel_mlps import forward as parallel_mlps_forward
from tests.rewrite.grouped_models import FAST, optimized
from tests.rewrite.list_models import (
    CASES,
    FAMILY,
    HALF_TOGETHER,
    SIZES,
    TOGETHER,
    Equal,
    Layers,
    Listed,
    Named,
    Shared,
    Sized,
    Split,
    agree,
    calls_seen,
    flat,
    kept,
    loss_of,
    own,
)

pytestmark = [
    pytest.mark.usefixtures("prices_of_one_processor"),
    pytest.mark.skipif(not TOGETHER, reason="unequal_linear has no kernels here"),
]


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_linears_of_a_list_become_one_call(
    name: str, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    make, draw, read = CASES[name]
    model, x = make().train(mode == "train"), draw()
    plain = copy.deepcopy(model)
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, families=FAMILY)
    loss = {"loss_fn": loss_of} if mode == "train" else {}
    result = fl.optimize_(model, x, config=config, **loss)
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert kept(result) == names, result.table()
    assert all(f"linears on {read} in one call" in s.reason for s in result.sites)
    assert {s.backends["forward"] for s in result.sites} == {"together"}
    found = [f for f in result.findings if f.code == "grouped_linear" and f.part_of is None]
    (finding,) = found  # a row among them claims nothing
    assert "optimize_ has put it in place" in finding.message
    assert finding.details["linears"] == sorted(names)
    seen = calls_seen(monkeypatch)
    agree(model, plain, x)
    with torch.no_grad():  # parameters are read at each call
        for m in (model, plain):
            for p in m.parameters():
                p.data.mul_(1.5)
    agree(model, plain, x)
    assert seen == [len(names)] * 2
    assert list(model.state_dict()) == list(plain.state_dict())
    stored = result.plan.to_json()
    assert {(r["rule"], r["route"]) for r in stored["rewrites"]} == {("unequal_linear", "chain")}
    result.revert()
    assert all("forward" not in vars(m) for m in model.modules())
    again = fl.apply_(model, stored, x, **loss)
    assert kept(again) == names
    agree(model, plain, x)
    assert len(seen) > 3


def test_an_activation_behind_all_of_them_is_part_of_the_call(clock: Any) -> None:
    clock(FAST)
    model, x = Equal().eval(), (own(sizes=((8, 6),) * 4),)
    result = optimized(model, x, families=FAMILY)
    (finding,) = [f for f in result.findings if f.code == "grouped_linear"]
    assert "each followed by silu" in finding.message
    ops: list[str] = []
    with torch.profiler.profile() as seen, torch.no_grad():
        model(*x)
    ops = [e.name for e in seen.events()]
    assert "aten::silu" not in ops
    hook = model.layers[1].register_forward_hook(lambda _, __, y: 2 * y)
    twice, (xs,) = model(*x), x
    torch.testing.assert_close(twice[1], F.silu(2 * (model.layers[1].weight @ xs[1].T).T
                               + 2 * model.layers[1].bias))  # fmt: skip
    hook.remove()


class Unbound(Layers):
    """Loops over a tensor, which no trace follows that does not know how many layers there are."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.layers, x.unbind(1), strict=True)
        return torch.cat([torch.tanh(layer(part)) for layer, part in pairs], -1)


def test_a_loop_over_a_tensor_is_followed_by_the_length_of_the_list(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = Unbound(tuple((8, n) for _, n in SIZES)).eval(), torch.randn(9, 5, 8)
    plain = copy.deepcopy(model)
    result = optimized(model, x, families=FAMILY)
    assert len(kept(result)) == 5
    assert {s.activation for s in result.sites} == {"tanh"}
    assert "activation left alone" not in result.table()
    seen = calls_seen(monkeypatch)
    agree(model, plain, (x,))
    with pytest.raises(ValueError, match="zip"):
        model(x[:, :4])  # as many parts as then, or the class's own forward
    assert seen == [5]
    stored = result.plan.to_json()
    result.revert()
    assert len(kept(fl.apply_(model, stored, x))) == 5


def test_a_changed_list_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = Sized().eval(), torch.randn(9, 36)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == 5
    seen = calls_seen(monkeypatch)

    def agrees(calls: int, x: Tensor = x) -> None:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
        assert len(seen) == calls

    agrees(1)
    agrees(2, torch.randn(2, 3, 36))
    agrees(3, x[0])
    hooks = [
        m.layers[1].register_forward_hook(lambda _, __, y: 2 * y) for m in (model, plain)
    ]  # fmt: skip
    agrees(3)
    for hook in hooks:
        hook.remove()
    for m in (model, plain):  # a layer of another class, one of another dtype
        m.layers[2] = nn.Sequential(m.layers[2], nn.Tanh())
    agrees(3)
    for m in (model, plain):
        m.layers[2] = m.layers[2][0]
    agrees(4)
    for m in (model, plain):  # written in place: the list of sizes is watched
        m.sizes[0], m.sizes[1] = 5, 8
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
    agrees(4)
    for m in (model, plain):
        m.sizes = [8, 5, 12, 8, 3]
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
    agrees(5)
    for m in (model, plain):  # another type of what holds the same
        m.sizes = tuple(m.sizes)
    agrees(5)
    for m in (model, plain):
        m.sizes = list(m.sizes)
        m.layers.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="zip"):
        model(x)
    for m in (model, plain):
        m.layers.pop(5)
    agrees(6)
    with pytest.raises(RuntimeError, match="split"):
        model(x[:, :35])
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.double())


def test_sizes_asked_of_the_layers_are_watched(clock: Any) -> None:
    clock(FAST)
    model, x = Split().eval(), torch.randn(9, 36)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == 5
    for m in (model, plain):
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_lists_of_another_length_or_type_are_left_to_the_class(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, xs = Named().eval(), tuple(own())
    plain = copy.deepcopy(model)
    assert optimized(model, (xs,), families=FAMILY).kept == 5
    seen = calls_seen(monkeypatch)
    for args in ((xs[:3],), (list(xs),), (xs, 3.0)):
        for a, b in zip(model(*args), plain(*args), strict=True):
            torch.testing.assert_close(a, b)
    assert seen == []
    model(xs)
    model(tuple(own((4,) * 5)))
    assert seen == [5, 5]
    with pytest.raises(TypeError, match="linear"):
        model((*xs[:4], None))


def test_slower_and_wrong_calls_are_not_kept(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock({**FAST, "after": 150.0})
    result = optimized(Listed().eval(), (own(),), families=FAMILY)
    assert result.kept == 0
    assert any("as unequal_linear left alone: one call is" in note for note in result.notes)
    clock(FAST)
    real = parallel_mlps_forward.unequal_linear
    wrong = lambda *a, **how: [y * 1.001 for y in real(*a, **how)]  # noqa: E731
    monkeypatch.setattr(parallel_mlps_forward, "unequal_linear", wrong)
    result = optimized(Listed().eval(), (own(),), families=FAMILY)
    assert result.kept == 0
    assert any("less accurate" in note for note in result.notes)


@pytest.mark.parametrize("row_us", [20.0, 80.0])
def test_of_a_row_and_a_list_the_faster_is_kept(
    row_us: float, clock: Any, monkeypatch: Any
) -> None:
    """Linears on one input may be one product on weights laid together as well."""
    from fastlinear.core.timing import Samples
    from fastlinear.rewrite.evaluate import site

    clock(FAST)

    def times(chain: Any, runs: Any, *_: Any) -> Any:
        after = 50.0 if chain.rule == "unequal_linear" else row_us
        given = {"before": 100.0, "after": after, "layers": 50.0}
        for name, run in runs.items():
            before = len(seen)
            run(chain.calls.kinds[0].x)
            together = chain.rule == "unequal_linear" and name == "after"
            assert len(seen) - before == (together or name == "layers"), "the row's rival"
        return {n: Samples(n, (given[n],) * 5, "wall", 1, "clock") for n in runs}, 1

    monkeypatch.setattr(site, "times", times)
    seen = calls_seen(monkeypatch)
    model = Layers(tuple((8, n) for _, n in SIZES)).eval()
    model.__class__ = Shared
    result = optimized(model, torch.randn(9, 8), families=FAMILY)
    rule = "grouped_linear" if row_us < 50.0 else "unequal_linear"
    assert {s.rule for s in result.sites if s.status == "kept"} == {rule}
    stored = result.plan.to_json()
    result.revert()
    assert fl.apply_(model, stored, torch.randn(9, 8)).kept == 5
    seen.clear()
    model(torch.randn(9, 8))
    assert seen == ([] if row_us < 50.0 else [5])


def test_frozen_layers_stay_without_gradients(clock: Any, monkeypatch: Any) -> None:
    from fastlinear.rewrite.evaluate import site

    clock(FAST)
    real, judged = site.failure, []

    def failure(chain: Any) -> Any:
        judged.append(chain.calls.grad)
        return real(chain)

    monkeypatch.setattr(site, "failure", failure)
    model, xs = Listed().train(), own()
    model.layers[0].requires_grad_(False)
    model.layers[2].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    config = fl.Config(mode="train", draws=1, optimizer_steps=1, families=FAMILY)
    assert fl.optimize_(model, (xs,), config=config, loss_fn=loss_of).kept == 5
    assert judged == [True], "the gradients of the others are compared"
    ys = model(xs)
    assert [y.requires_grad for y in ys] == [False, True, True, True, True]
    for y in ys:
        y.add_(1.0)  # each writable by itself
    agree(model, plain, (xs,))


@pytest.mark.parametrize("name", ["listed", "equal", "sized", "shared"])
def test_compiled_autocast_and_functional_calls_are_right(name: str, clock: Any) -> None:
    clock(FAST)
    make, draw, _ = CASES[name]
    model, x = make().eval(), draw()
    plain = copy.deepcopy(model)
    optimized(model, x, families=FAMILY)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = flat(model(*x)), flat(plain(*x))
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    state = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
    ours, theirs = (flat(torch.func.functional_call(m, state, x)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(flat(compiled(*x)), flat(plain(*x)), rtol=2e-5, atol=2e-5)
    torch.compiler.reset()


@pytest.mark.skipif(not HALF_TOGETHER, reason="unequal_linear has no bfloat16 here")
def test_autocast_that_was_on_is_kept(clock: Any) -> None:
    clock(FAST)

    class Cast(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.0

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Cast()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    model, x = Outer().eval(), torch.randn(9, 36)
    plain = copy.deepcopy(model)
    result = optimized(model, x, families=FAMILY)
    assert len(kept(result)) == 5, result.table()
    torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)


def test_a_list_forward_computes_what_its_layers_do() -> None:
    model, xs = Layers(), own()
    names, keys = ("layers",), tuple("01234")
    found = list_forward.call_list(model, names, keys, "gelu", *xs)
    for y, layer, x in zip(found, model.layers, xs, strict=True):
        torch.testing.assert_close(y, F.gelu(layer(x)))
    model.layers[0].double()
    with pytest.raises(RuntimeError, match="dtype"):
        list_forward.call_list(model, names, keys, "gelu", *xs)
