"""Every way to take the halves of one linear's output; and gated MLPs that only a run shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.timing import Samples
from fastlinear.rewrite.evaluate import site
from fastlinear.rewrite.rules.gated import forward as gated_forward

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 32, 96


def optimized(model: nn.Module, x: Tensor) -> Any:
    config = fl.Config(draws=1, optimizer_steps=1, time_budget_s=60.0, families=("gated_mlp",))
    return fl.optimize_(model, x, config=config)


def told(result: Any) -> list[Any]:
    return [f for f in result.findings if f.code == "gated_mlp"]


Take = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


class Taking(nn.Module):
    """A block that takes the halves of its linear's output as ``take`` does."""

    take: Take

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.down = nn.LayerNorm(K), nn.Linear(K, 2 * H), nn.Linear(H, K)
        self.hidden = H

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        gate, up = self.take(self.both(x), x)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


def taking(take: Take) -> type[Taking]:
    return type("Took", (Taking,), {"take": take})


def _by_attribute(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h[..., : self.hidden], h[..., self.hidden :]


def _by_shape(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    d = h.shape[-1] // 2
    return h[..., :d], h[..., d:]


def _by_size(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    d = h.size(-1) // 2
    return h.narrow(-1, d, d), torch.narrow(h, -1, 0, d)


def _by_split_of_shape(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.split(h.shape[-1] // 2, dim=-1)
    return gate, up


def _unbound(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = torch.unbind(h.unflatten(-1, (2, -1)), -2)
    return gate, up


def _unbound_in_turns(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.unflatten(-1, (self.hidden, 2)).unbind(-1)
    return gate, up


def _selected(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    parts = torch.unflatten(h, -1, (2, self.hidden))
    return torch.select(parts, -2, 1), parts.select(-2, 0)


AT_ANY_RANK = {
    "ellipsis": lambda self, h, x: (h[..., :96], h[..., 96:]),
    "from the end": lambda self, h, x: (h[..., -96:], h[..., :-96]),
    "attribute": _by_attribute,
    "shape": _by_shape,
    "size": _by_size,
    "split of shape": _by_split_of_shape,
    "split by sizes": lambda self, h, x: torch.split(h, [96, 96], -1),
    "split by size": lambda self, h, x: h.split(96, dim=-1),
    "tensor_split": lambda self, h, x: torch.tensor_split(h, 2, dim=-1),
    "tensor_split at": lambda self, h, x: h.tensor_split((96,), dim=-1),
    "chunk": lambda self, h, x: torch.chunk(h, 2, dim=-1),
    "unbind": _unbound,
    "unbind in turns": _unbound_in_turns,
    "select": _selected,
    "in turns": lambda self, h, x: (h[..., ::2], h[..., 1::2]),
}


def _viewed(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    both = h.view(h.shape[0], h.shape[1], 2, 96)
    return both[:, :, 0], both[:, :, 1]


def _viewed_as_input(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.reshape(x.shape[0], x.size(1), 96, 2).unbind(3)
    return gate, up


AT_RANK_THREE = {
    "slices": lambda self, h, x: (h[:, :, :96], h[:, :, 96:]),
    "chunk": lambda self, h, x: h.chunk(2, 2),
    "hidden first": lambda self, h, x: h.tensor_split(2, 2)[::-1],
    "view": _viewed,
    "reshape": _viewed_as_input,
}
EVERY = [(take, True) for take in AT_ANY_RANK.values()]
EVERY += [(take, False) for take in AT_RANK_THREE.values()]
NAMES = [f"any rank: {n}" for n in AT_ANY_RANK] + [f"rank 3: {n}" for n in AT_RANK_THREE]


def seen_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = gated_forward.call

    def call(*args: Any) -> Tensor:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(gated_forward, "call", call)
    return seen


@pytest.mark.parametrize(("take", "anyhow"), EVERY, ids=NAMES)
def test_halves_however_they_are_taken(
    take: Take, anyhow: bool, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call; and what the forward does by itself where the halves are others at another rank."""
    clock(FAST)
    torch.manual_seed(0)
    model = nn.Sequential(taking(take)()).eval()
    plain = copy.deepcopy(model)
    result = optimized(model, torch.randn(3, 20, K))
    assert {s.fqn for s in result.sites if s.status == "kept"} == {"0.both", "0.down"}
    assert len(told(result)) == 1
    seen = seen_calls(monkeypatch)
    with torch.no_grad():
        for shape in ((3, 20, K), (2, 7, K), (1, 1, K), (130, 200, K)):
            x = torch.randn(shape)
            torch.testing.assert_close(model(x), plain(x), rtol=2e-5, atol=2e-5)
        assert seen == ["gated_mlp"] * 4
        for shape in ((20, K), (K,), (2, 3, 2 * H, K), (2, 2, 2, 2, K)):
            x = torch.randn(shape)
            try:
                expected = plain(x)
            except (RuntimeError, IndexError, ValueError) as error:
                with pytest.raises(type(error)):
                    model(x)
            else:
                torch.testing.assert_close(model(x), expected, rtol=2e-5, atol=2e-5)
    assert (len(seen) > 5) is anyhow


def _few_tokens(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, :100, :96], h[:, :100, 96:]


def _of_a_bound(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h[:1000000000, ..., :96], h[:1000000000, ..., 96:]


def _elsewhere(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h[..., :96], h[..., 95:-1]


def _of_tokens(self: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, 1)
    return gate[..., :96], up[..., :96]


@pytest.mark.parametrize("take", [_few_tokens, _of_a_bound, _elsewhere, _of_tokens])
def test_what_are_no_halves_stays(take: Take, clock: Any) -> None:
    """Bounds that these inputs do not reach, other columns, rows instead of columns."""
    clock(FAST)
    model = nn.Sequential(taking(take)()).eval()
    plain = copy.deepcopy(model)
    x = torch.randn(1, 20, K)
    result = optimized(model, x)
    assert result.kept == 0
    assert torch.equal(model(x), plain(x))
    assert "forward" not in vars(model[0])


class Raw(nn.Module):
    """Weights that are no layers', behind a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        for name, shape in {"w1": (H, K), "w2": (K, H), "w3": (H, K)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        x = self.norm(x)
        return F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2)  # type: ignore[arg-type]


class Multiplied(Raw):
    """The same written with matrix products, of a weight as it is, of one turned and by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w4 = nn.Parameter(torch.randn(K, H) / K**0.5)
        self.b1, self.b2 = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(K))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        x = self.norm(x)
        h = F.gelu(input=x @ self.w1.t() + self.b1)  # type: ignore[operator]
        h = torch.einsum("...i,...i->...i", h, torch.matmul(input=x, other=self.w4))
        y: Tensor = torch.einsum("bsh,kh->bsk", h, self.w2) + self.b2
        return y


class Branching(nn.Module):
    """What runs depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(K), nn.Linear(K, H), nn.Linear(K, H)
        self.down, self.act = nn.Linear(H, K), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        x = self.norm(x)
        y: Tensor = self.down(self.up(x) * self.act(self.gate(x)))
        return y


class Starred(Taking):
    """A view by an unpacked shape, which symbols cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(self.norm(x))
        h = h.view(*h.shape[:-1], 2, H)
        y: Tensor = self.down(torch.sigmoid(h[..., 0, :]) * h[..., 1, :])
        return y


class BySplitting(Taking):
    """A value that the trace follows, taken apart in a way it does not."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).flatten(0, 1).hsplit(2)
        y: Tensor = self.down(gate * up)
        return y.view(x.shape)


class Buried(Branching):
    """F.glu behind a branch, and no linear behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(K, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        return F.glu(self.both(x)).sum(-1)


UNSEEN = {
    Raw: (
        "silu",
        "decides by a tensor",
        "fl.gated_mlp on model[0].w1, model[0].w3, model[0].w2",
    ),
    Multiplied: (
        "gelu",
        "decides by a tensor",
        "fl.gated_mlp on model[0].w1, model[0].w4.t(), model[0].w2",
    ),
    Branching: (
        "relu",
        "decides by a tensor",
        "model[0].gate.weight, model[0].up.weight, model[0].down.weight",
    ),
    Starred: ("sigmoid", "fastlinear cannot trace", "model[0].both.weight, model[0].down.weight"),
    BySplitting: ("none", "does not show it", "model[0].both.weight, model[0].down.weight"),
    Buried: ("sigmoid", "decides by a tensor", "fl.gated_linear on model[0].both.weight"),
}


@pytest.mark.parametrize("make", UNSEEN)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_what_only_a_run_shows_is_told(make: Any, mode: str, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(make()).train(mode == "train"), torch.randn(2, 20, K)
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, families=("gated_mlp",))
    result = fl.optimize_(model, x, config=config)
    assert result.kept == 0
    (found,) = told(result)
    activation, why, advice = UNSEEN[make]
    assert found.fqn == "0"
    assert found.details["activation"] == activation
    assert found.details["calls"] == 1
    assert why in found.message, found.message
    assert advice in found.message, found.message
    assert found.title == f"gated MLP of {H} hidden features, {activation}"


class Clamped(Branching):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        y: Tensor = self.down(self.up(x).clamp(-1.0, 1.0) * self.act(self.gate(x)))
        return y


class OfTwo(Branching):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        y: Tensor = self.down(self.up(x + 1) * self.act(self.gate(x)))
        return y


class Between(Branching):
    """The input is written to between the products."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.sum() > 1e9:
            x = x / 2
        gate = self.act(self.gate(x))
        x += 1
        y: Tensor = self.down(self.up(x) * gate)
        return y


class Overwritten(Branching):
    """A factor is written to before the product."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.sum() > 1e9:
            x = x / 2
        up = self.up(x)
        up += 1
        y: Tensor = self.down(up * self.act(self.gate(x)))
        return y


@pytest.mark.parametrize("make", [Clamped, OfTwo, Between, Overwritten])
def test_what_runs_otherwise_is_no_gated_mlp(make: Any, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(make()).eval(), torch.randn(2, 20, K)
    assert not told(optimized(model, x))


def test_compiled_parts_are_watched_uncompiled(clock: Any) -> None:
    clock(FAST)
    inner = Branching().eval()
    inner.forward = torch.compile(inner.forward, backend="eager")  # type: ignore[method-assign]
    result = optimized(nn.Sequential(inner, nn.Linear(K, 8)).eval(), torch.randn(2, 20, K))
    assert len(told(result)) == 1


def test_what_the_whole_step_decided_is_told_so(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own measurement may leave a call open that is kept; the finding does not then say both
    that it gains nothing and that it is in place."""
    clock(FAST)
    after = (111.0, 91.0, 91.0, 91.0, 77.0)

    def interleave(runs: dict[str, Any], **_: Any) -> dict[str, Samples]:
        times = {"after": after}
        return {n: Samples(n, times.get(n, (100.0,) * 5), "wall", 1, "clock") for n in runs}

    monkeypatch.setattr(site, "interleave", interleave)
    result = optimized(nn.Sequential(taking(_by_shape)()).eval(), torch.randn(512, K))
    assert result.kept == 2
    (found,) = told(result)
    assert "open by itself, decided on the whole step. optimize_ has put it in place" in (
        found.message
    )
    assert "not beyond noise" not in found.message
