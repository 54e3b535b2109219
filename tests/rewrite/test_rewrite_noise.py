"""Gradients that are 0 but for rounding reject nothing, whatever the oracle; wrong ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.core.compare import Verdict
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.oracle import make_oracle
from fastlinear.rewrite.verify.roundings import OtherRoundings, spreads
from fastlinear.rewrite.verify.running import Runner, run_once
from fastlinear.rewrite.verify.verdicts import GRADIENTS, pool

CPU = torch.device("cpu")


class Pooling(nn.Module):
    """Softmax over tokens by scores of one number each: their biases cancel."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.scores = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
        self.out, self.dropout = nn.Linear(96, 3), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dropout(F.relu(self.inner(x))))
        return self.out(torch.cat([(s(h).softmax(1) * h).sum(1) for s in self.scores], -1))


class Attention(nn.Module):
    """The key's bias adds the same to every score of a row."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(p)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = (self.q(h) @ self.k(h).transpose(-1, -2) / 4).softmax(-1)
        return x + self.out(self.dropout(weights) @ self.v(h))


class Recurrent(nn.Module):
    """Attention over what an LSTM with dropout gives."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.lstm = nn.LSTM(16, 16, 2, dropout=p, batch_first=True)
        self.key, self.score, self.out = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(F.gelu(self.inner(x)))
        return self.out((self.score(torch.tanh(self.key(h))).softmax(1) * h).sum(1))


class Normed(nn.Module):
    """A batch norm takes the mean of every column away, and the bias with it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.a, self.layer_norm, self.b = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.batch_norm, self.out, self.dropout = (
            nn.BatchNorm1d(32),
            nn.Linear(32, 4),
            nn.Dropout(p),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.silu(self.layer_norm(self.a(x.flatten(0, 1)))))
        return self.out(F.relu(self.batch_norm(self.b(h))))


KINDS = {"pooling": Pooling, "attention": Attention, "recurrent": Recurrent, "normed": Normed}
CANCELS = {
    "pooling": "scores.0",
    "attention": "k",
    "recurrent": "score",
    "normed": "b",
}  # linears whose bias cancels


class _Linear(torch.autograd.Function):
    """A linear whose sums run in another order; its bias gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return F.linear(x.flip(-1), weight.flip(-1), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).flip(0)
        db = rows.cumsum(0)[-1] * ctx.factor
        return dy @ weight, rows.t() @ x.reshape(-1, x.shape[-1]).flip(0), db, None


def linear(factor: float = 1.0) -> Callable[..., Tensor]:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, factor)

    return forward


def judged(
    model: nn.Module, x: Tensor, bad: dict[str, Any] | None = None, steps: bool = True
) -> tuple[list[Verdict], str]:
    """Verdicts of the model with its linears in another order, and the oracle's name."""
    runner, call = Runner("train", None, CPU, 0), Call((x,), {})
    ran = run_once(model, call, runner)
    oracle, exact = make_oracle(model, runner, call, ran)
    judge = verify.Judge(
        model, runner, call, draws=2, oracle=oracle, seconds=30, ran=ran, exact=exact
    )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    swaps = SwapSet([Swap(n, m, (bad or {}).get(n, linear())) for n, m in linears.items()])
    found = judge.verdicts(swaps)
    if steps and all(v.passed for v in found):
        found += judge.trajectory(swaps, 2)
    return found, oracle.name


def made(kind: str, seed: int, p: float, zeroed: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    model = KINDS[kind](p)
    if zeroed:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model, torch.randn(6, 12, 16)


@pytest.mark.parametrize("zeroed", [False, True], ids=["drawn", "zeroed"])
@pytest.mark.parametrize("p", [0.0, 0.1], ids=["float64_model", "float64_linears"])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_rejects_nothing(kind: str, p: float, zeroed: bool) -> None:
    for seed in range(4 if kind in ("pooling", "recurrent") else 2):
        found, oracle = judged(*made(kind, seed, p, zeroed))
        assert oracle.startswith("float64 linears" if p else "float64 model")
        assert [str(v) for v in found if not v.passed] == []


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["float64_model", "float64_linears"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [0.0, 1.001], ids=["dropped", "scaled"])
def test_a_wrong_gradient_is_rejected(kind: str, p: float, factor: float) -> None:
    model, x = made(kind, 0, p)
    found, _ = judged(model, x, {"out": linear(factor)})
    assert "grad.out.bias" in {v.name for v in found if not v.passed}


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["float64_model", "float64_linears"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_gradient_where_noise_is_right_is_rejected(kind: str, p: float) -> None:
    """1e-4 of all gradients in place of 0."""

    class Added(_Linear):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            dx, dw, db, _ = _Linear.backward(ctx, dy)
            return dx, dw, db + size, None

    model, x = made(kind, 0, p)
    results = Runner("train", None, CPU, 0).results(model, Call((x,), {}))
    grads = [t.norm() for n, t in results.items() if n.startswith(GRADIENTS)]
    size = 1e-4 * float(torch.stack(grads).norm())

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return Added.apply(x, self.weight, self.bias, 1.0)

    found, _ = judged(model, x, {CANCELS[kind]: forward}, steps=False)
    failed = {v.name for v in found if not v.passed}
    assert failed == {f"grad.{CANCELS[kind]}.bias"}


def test_a_draw_of_large_spread_excuses_no_other() -> None:
    """Where a decision hangs by one rounding, PyTorch's own gradients of that draw move by much."""
    exact = [Verdict("grad.w", 0.3, 2e-7, 4e-7)] * 5
    tied = Verdict("grad.w", 0.3, 0.57, 1.1)
    assert pool("grad.w", [tied, *exact]).passed
    assert not pool("grad.w", [tied, *exact], alone=True).passed
    near = [Verdict("grad.w", 7e-7, 2e-7, 4e-7), Verdict("grad.w", 1e-7, 2e-7, 4e-7)]
    assert not pool("grad.w", near).passed
    lucky = [Verdict("grad.w", 5e-7, 2e-7, 4e-7), Verdict("grad.w", 1e-7, 2e-7, 4e-7)]
    assert pool("grad.w", lucky, alone=True).passed


class Gated(nn.Module):
    """A part whose gradient stops where a gate that may hang by one rounding says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.gate = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        with torch.no_grad():
            self.gate.weight.zero_()
            self.gate.weight[0, :2] = torch.tensor([1.0, -1.0])
            self.gate.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        keep = self.gate(x).detach() >= 0
        h = self.body(x)
        return 0.01 * torch.where(keep, h, h.detach()) + self.head(x)


@pytest.mark.parametrize("factor", [1.05, 1.3])
def test_a_tie_in_one_draw_excuses_no_wrong_gradient(factor: float) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(6, 12, 16)
    x[..., 1] = x[..., 0]  # the gate is 0 but for rounding, in the caller's own input alone
    assert [str(v) for v in judged(model, x)[0] if not v.passed] == []
    found, _ = judged(model, x, {"body": linear(factor)}, steps=False)
    assert "grad.body.bias" in {v.name for v in found if not v.passed}


def test_a_dropped_gradient_is_rejected_even_if_it_is_noise() -> None:
    model, x = made("pooling", 0, 0.1)

    def detached(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.detach())

    found, _ = judged(model, x, {"scores.0": detached}, steps=False)
    assert "grad.scores.0.bias" in {v.name for v in found if not v.passed}


def test_noise_is_told_from_gradients_by_pytorchs_own_runs() -> None:
    model, x = made("pooling", 0, 0.1)
    runner, call = Runner("train", None, CPU, 0), Call((x,), {})
    ran = run_once(model, call, runner)
    oracle, _ = make_oracle(model, runner, call, ran)
    exact = oracle.run_like(ran, model, call, runner.results)
    runs = [ran.results]
    for seed in range(3):
        with OtherRoundings(seed):
            runs.append(runner.results(model, call))
    found = spreads([(0, exact, runs)], GRADIENTS)[0]
    assert found.noise <= {f"grad.scores.{i}.bias" for i in range(3)}
    for name, error in found.errors.items():
        relative = error / float(exact[name].norm())
        assert (relative > 1e-3) == name.startswith("grad.scores") * name.endswith("bias"), name


@pytest.mark.parametrize("autocast", [False, True])
def test_other_roundings_are_of_the_size_of_one(autocast: bool) -> None:
    torch.manual_seed(0)
    fc, x = nn.Linear(64, 64), torch.randn(32, 64)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = fc(x).double()
        with OtherRoundings(0):
            moved, again = fc(x).double(), fc(x).double()
            written = (x @ fc.weight.t() + fc.bias).double()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(moved, again)
    rounding = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps / 2
    for found in (moved, written):
        off = float((found - plain).detach().norm() / plain.detach().norm())
        assert 0.1 * rounding < off < 4 * rounding
