"""Linears on one input, or on its parts in a larger forward: rewritten as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from tests.rewrite.grouped_models import (
    FAST,
    Attention,
    ByIndex,
    Heads,
    Inside,
    optimized,
    same_results,
)

CASES = {
    "attention": (Attention, (2, 5, 16), ("to_q", "to_k", "to_v")),
    "heads": (Heads, (9, 8), tuple(f"heads.{i}" for i in range(4))),
    "inside": (Inside, (9, 6), tuple(f"projs.{i}" for i in range(4))),
    "by index": (ByIndex, (2, 9, 6), tuple(f"projs.{i}" for i in range(4))),
}
FAMILY = ("grouped_linear",)


def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers every rewritten call computes together from here on."""
    from fastlinear.rewrite.rules.grouped.rows import forward as row_forward
    from fastlinear.rewrite.rules.grouped.rows import loop_forward as parts

    seen: list[int] = []

    def counted(real: Any) -> Any:
        def together(*given: Any) -> Any:
            found = real(*given)
            if found is not None:
                seen.append(len(found))
            return found

        return together

    for home, name in ((row_forward, "together"), (parts, "side_by_side")):
        monkeypatch.setattr(home, name, counted(getattr(home, name)))
    return seen


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_layers_on_one_input_become_one(
    name: str, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    make, shape, inside = CASES[name]
    model, x = nn.Sequential(make()).train(mode == "train"), torch.randn(shape)
    plain, names = copy.deepcopy(model), {f"0.{n}" for n in inside}
    result = optimized(model, x, mode, families=FAMILY)
    kept = {s.fqn: s for s in result.sites if (s.rule, s.status) == ("grouped_linear", "kept")}
    assert set(kept) == names, result.table()
    what = "on one input" if name in ("attention", "heads") else "on parts of one tensor"
    assert all(f"linears {what} in one call" in s.reason for s in kept.values())
    (finding,) = [f for f in result.findings if f.code == "grouped_linear"]
    assert "optimize_ has put it in place" in finding.message
    seen = rows(monkeypatch)
    same_results(model, plain, x)
    same_results(model, plain, torch.cat([x, x]))
    assert seen == [len(inside)] * 2
    for change in ("in place", "data", "state", "step"):  # weights changed between calls
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        with torch.no_grad():
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                if change == "in place":
                    a.mul_(1.5), b.mul_(1.5)
                elif change == "data":
                    a.data, b.data = (torch.full_like(b, 0.01) for _ in range(2))
                    a.data[..., 0], b.data[..., 0] = 0.5, 0.5
        if change == "state":
            state = nn.Sequential(make()).state_dict()
            model.load_state_dict(state), plain.load_state_dict(state)
        if change == "step":
            for optimizer in optimizers:
                optimizer.step()
        same_results(model, plain, x)
    stored = result.plan.to_json()
    assert {
        r["fqn"]: (r["rule"], r["route"], r["parent_fqn"]) for r in stored["rewrites"]
    } == dict.fromkeys(names, ("grouped_linear", "chain", "0"))
    result.revert()
    assert all("forward" not in vars(m) for m in model.modules())
    again = fl.apply_(model, stored, x)
    assert {s.fqn for s in again.sites if (s.rule, s.status) == ("grouped_linear", "kept")} == names
    same_results(model, plain, x)


def test_frozen_layers_stay_without_gradients(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Attention()).train(), torch.randn(2, 5, 16)
    model[0].to_k.requires_grad_(False)
    model[0].to_v.bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    assert optimized(model, x, "train", families=FAMILY).kept == 3
    same_results(model, plain, x)
    from fastlinear.rewrite.rules.grouped.rows.forward import call_row

    ys = call_row(model[0], ("to_q", "to_k", "to_v"), x)
    assert [y.requires_grad for y in ys] == [True, False, True]


def test_a_changed_parent_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = nn.Sequential(Heads()).eval(), torch.randn(9, 8)
    plain = copy.deepcopy(model)
    optimized(model, x, families=FAMILY)
    seen = rows(monkeypatch)

    def agrees(x: Tensor = x) -> None:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)

    agrees(torch.randn(2, 3, 8))
    agrees(x[0])
    assert len(seen) == 2
    hooks = [m[0].heads[1].register_forward_hook(lambda _, __, y: 2 * y) for m in (model, plain)]
    agrees()
    for hook in hooks:
        hook.remove()
    for m in (model, plain):  # another class, a bias among layers without
        m[0].heads[2] = nn.Sequential(m[0].heads[2], nn.Tanh())
    agrees()
    for m in (model, plain):
        m[0].heads[2] = nn.Linear(8, 3)
        nn.init.ones_(m[0].heads[2].weight)
        nn.init.ones_(m[0].heads[2].bias)
    agrees()
    assert len(seen) == 3  # the others' biases are 0
    for m in (model, plain):  # another size is as good, one layer more is another forward
        m[0].heads[2] = nn.Linear(8, 5, bias=False)
        nn.init.ones_(m[0].heads[2].weight)
    agrees()
    assert len(seen) == 4
    for m in (model, plain):
        m[0].heads.append(nn.Linear(8, 3))
        nn.init.ones_(m[0].heads[4].weight)
        nn.init.ones_(m[0].heads[4].bias)
    agrees()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.double())
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :7])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(x).any()


class Written(nn.Module):
    """Writes to the input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1
        y = self.q(h)
        h.add_(x * 0)
        return y + self.k(h)


class Views(Written):
    """Reads one tensor through two views."""

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x.view_as(x)) + self.k(x.view_as(x))


class Tied(Written):
    def __init__(self) -> None:
        super().__init__()
        self.k.weight = self.q.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


class Alone(Written):
    """Calls one of them once more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.q(x * 2)


@pytest.mark.parametrize("make", [Written, Views, Tied, Alone])
def test_layers_that_are_not_sure_to_read_one_value_are_left_alone(make: Any, clock: Any) -> None:
    clock(FAST)
    model = make().eval()
    assert optimized(model, torch.randn(9, 8), families=FAMILY).kept == 0
    assert "forward" not in vars(model)


def test_parts_of_another_number_are_left_to_the_class(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = nn.Sequential(Inside()).eval(), torch.randn(9, 6)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == 4
    seen = rows(monkeypatch)
    assert torch.allclose(model(x), plain(x), atol=1e-5)
    hooks = [m[0].projs[1].register_forward_hook(lambda _, __, y: 2 * y) for m in (model, plain)]
    assert torch.allclose(model(x), plain(x), atol=1e-5)
    for hook in hooks:
        hook.remove()
    for m in (model, plain):  # chunk now gives two parts, which the loop takes as they are
        m[0].into, m[0].out = nn.Linear(6, 2), nn.Linear(10, 3)
        for i in range(2):
            m[0].projs[i] = nn.Linear(1, 5)
        torch.manual_seed(0)
        for p in m.parameters():
            nn.init.normal_(p)
    assert torch.equal(model(x), plain(x))
    assert len(seen) == 1
    for m in (model, plain):  # as many parts, of sizes that differ
        m[0].into, m[0].out = nn.Linear(6, 7), nn.Linear(20, 3)
        for i, k in enumerate((2, 2, 2, 1)):
            m[0].projs[i] = nn.Linear(k, 5)
        torch.manual_seed(0)
        for p in m.parameters():
            nn.init.normal_(p)
    assert torch.equal(model(x), plain(x))
    assert len(seen) == 1


class Rows(Inside):
    """Chunks of the first dimension are no parts of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.projs = nn.ModuleList(nn.Linear(32, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).chunk(4, 0)
        found = [proj(part) for proj, part in zip(self.projs, parts, strict=True)]
        return self.out(torch.cat(found, -1))


def test_chunks_of_rows_are_left_alone(clock: Any) -> None:
    clock(FAST)
    model, x = Rows().train(), torch.randn(8, 6)
    plain = copy.deepcopy(model)
    optimized(model, x, "train", families=FAMILY)
    same_results(model, plain, x)


def test_what_is_written_between_layers_is_looked_at() -> None:
    from fastlinear.profile.graph import Observed, trace
    from fastlinear.rewrite.match.links import Links
    from fastlinear.rewrite.rules.grouped.rows.traced import rows_of

    def found(model: nn.Module) -> list[tuple[str, ...]]:
        graph = trace(model, Observed.of((torch.randn(2, 8),), {}), runnable=True)
        links = Links(model, graph, {})
        return rows_of(links, links.layers)

    assert found(Heads()) == [tuple(f"heads.{i}" for i in range(4))]
    assert found(Written()) == []

    class Own(nn.Module):
        """Writes to the value that two linears read, the output of a third."""

        def __init__(self) -> None:
            super().__init__()
            self.p, self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.p(x)
            q = self.q(h)
            h.add_(1.0)
            y: Tensor = q + self.k(h)
            return y

    assert found(Own()) == []


class Twice(nn.Module):
    """Calls its attention twice, once by keyword, and drops between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Attention(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(self.inner(x)))


def test_a_parent_called_twice_is_one_call_each_time(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = Twice().eval(), torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    assert optimized(model, x, families=FAMILY).kept == 3
    seen = rows(monkeypatch)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert seen == [3, 3]
    torch.testing.assert_close(model.inner(x=x), plain.inner(x), rtol=1e-5, atol=1e-5)


def test_rows_and_activations_of_one_parent_are_one_forward(clock: Any) -> None:
    """The parent's trace is built once for all that is fused in it."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.up(self.q(x) + self.k(x)))

    clock(FAST)
    model, x = Both().train(), torch.randn(9, 8)
    plain = copy.deepcopy(model)
    result = optimized(model, x, "train")
    assert {s.fqn: s.rule for s in result.sites if s.status == "kept"} == {
        "q": "grouped_linear",
        "k": "grouped_linear",
        "up": "linear_act",
    }
    same_results(model, plain, x)


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_model_compiles_whole(name: str, clock: Any) -> None:
    clock(FAST)
    make, shape, inside = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    expected = model(x)
    assert optimized(model, x, families=FAMILY).kept == len(inside)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=2e-5, atol=2e-5)
    torch.compiler.reset()  # containers share one forward, whose compilations are counted


@pytest.mark.parametrize("name", CASES)
def test_autocast_and_functional_calls_are_right(name: str, clock: Any) -> None:
    clock(FAST)
    make, shape, _ = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    plain = copy.deepcopy(model)
    optimized(model, x, families=FAMILY)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    state = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
    ours, theirs = (torch.func.functional_call(m, state, (x,)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_slower_and_wrong_calls_are_not_kept(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 16)
    clock({**FAST, "after": 150.0})
    result = optimized(Attention(), x, families=FAMILY)
    assert result.kept == 0
    assert any("one call is" in note for note in result.notes)
    clock(FAST)
    from fastlinear.rewrite.rules.grouped.rows import forward as row_forward

    real = row_forward.linear_act
    wrong = lambda *a, **how: real(*a, **how) * 1.001  # noqa: E731
    monkeypatch.setattr(row_forward, "linear_act", wrong)
    result = optimized(Attention(), x, families=FAMILY)
    assert result.kept == 0
    assert any("less accurate" in note for note in result.notes)


def test_models_of_transformers_share_queries_keys_and_values(clock: Any) -> None:
    """Their attention cannot be traced; their gated MLP can."""
    transformers = pytest.importorskip("transformers")
    clock(FAST)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    model = transformers.LlamaModel(config).eval()
    given = {"input_ids": torch.randint(0, 50, (2, 9)), "use_cache": False}
    result = optimized(model, given, families=FAMILY)
    kept = {s.fqn for s in result.sites if s.status == "kept"}
    shared = {f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    assert kept == {"layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"} | shared
    (told,) = [f.message for f in result.findings if f.fqn == "layers.0.self_attn"]
    assert "optimize_ has put it in place" in told
    result.revert()
    whole = optimized(model, given)
    assert "gated_mlp" in {s.rule for s in whole.sites if s.fqn == "layers.0.mlp.up_proj"}
