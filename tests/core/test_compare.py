"""The rule of numbers: what passes, what never may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fastlinear.core.compare import (
    DRAWS,
    Verdict,
    clear_of_kinks,
    judge,
    other_side,
    over_draws,
    pooled,
    relative_error,
    silent_at_kinks,
    unit_rounding,
)

NAN, INF = float("nan"), float("inf")


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_relative_error_is_the_frobenius_ratio() -> None:
    assert relative_error(tensor(3.0, 4.5), tensor(3.0, 4.0)) == pytest.approx(0.1)
    assert relative_error(tensor(0.0, 2.0), tensor(0.0, 0.0)) == 2.0
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relative_error_of_a_non_finite_entry_is_infinite(bad: float) -> None:
    assert relative_error(tensor(1.0, bad), tensor(1.0, 2.0)) == INF


def test_relative_error_accepts_only_the_oracles_own_non_finite_entries() -> None:
    oracle = tensor(1.0, NAN, INF)
    assert relative_error(tensor(1.0, NAN, INF), oracle) == 0.0
    assert relative_error(tensor(1.0, 0.0, INF), oracle) == INF
    assert relative_error(tensor(1.0, NAN, -INF), oracle) == INF
    assert relative_error(tensor(1.0, INF, INF), oracle) == INF


def test_relative_error_of_another_shape_is_infinite() -> None:
    assert relative_error(torch.ones(3), torch.ones(1, 3)) == INF


def test_judge_allows_twice_torchs_error_and_no_more() -> None:
    oracle = torch.ones(1000, dtype=torch.float64)
    torchs = torch.full((1000,), 1.0 + 1e-3)
    assert judge("y", torch.full((1000,), 1.0 + 1.99e-3), torchs, oracle).passed
    assert not judge("y", torch.full((1000,), 1.0 + 2.01e-3), torchs, oracle).passed
    assert judge("y", torch.full((1000,), 1.0 + 2.9e-3), torchs, oracle, factor=3).passed


def test_judge_forgives_two_roundings_where_torch_is_exact() -> None:
    oracle = torch.ones(4, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert judge("y", torch.ones(4) + eps, torch.ones(4), oracle).passed
    assert not judge("y", torch.ones(4) + 2 * eps, torch.ones(4), oracle).passed


@pytest.mark.parametrize("torchs", [0.0, NAN, INF])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_judge_never_passes_a_non_finite_result(bad: float, torchs: float) -> None:
    """Not even where torch has a non-finite value at another place."""
    oracle = tensor(1.0, 2.0, dtype=torch.float64)
    assert not judge("y", tensor(1.0, bad), tensor(torchs, 2.0), oracle).passed
    assert not judge("y", tensor(bad, bad), tensor(1.0, 2.0), oracle).passed


def test_judge_where_torch_overflows() -> None:
    """float16 overflows at 7e4: ours may overflow alike or stay finite, the rest is judged."""
    half = torch.float16
    oracle = tensor(7e4, 0.0, 1.0, dtype=torch.float64)
    torchs = tensor(INF, 0.0, 1.0, dtype=half)
    assert judge("y", torchs.clone(), torchs, oracle).passed
    assert judge("y", tensor(65504.0, 0.0, 1.0, dtype=half), torchs, oracle).passed
    assert not judge("y", tensor(INF, NAN, 1.0, dtype=half), torchs, oracle).passed
    assert not judge("y", tensor(-INF, 0.0, 1.0, dtype=half), torchs, oracle).passed
    assert not judge("y", tensor(NAN, 0.0, 1.0, dtype=half), torchs, oracle).passed
    assert not judge("y", tensor(INF, 0.0, 1.5, dtype=half), torchs, oracle).passed
    oracle_nan = tensor(NAN, 7e4, 1.0, dtype=torch.float64)
    torchs = tensor(NAN, INF, 1.0, dtype=half)
    assert judge("y", torchs.clone(), torchs, oracle_nan).passed
    assert not judge("y", tensor(0.0, INF, 1.0, dtype=half), torchs, oracle_nan).passed


def test_judge_refuses_another_dtype() -> None:
    """A bfloat16 result must not earn bfloat16's tolerance where float32 was asked for."""
    oracle = torch.ones(4, dtype=torch.float64)
    assert not judge("y", torch.ones(4, dtype=torch.bfloat16), torch.ones(4), oracle).passed


def test_judge_refuses_another_shape() -> None:
    assert not judge("y", torch.ones(1, 4), torch.ones(4), torch.ones(4).double()).passed


def test_verdict_with_nan_never_passes() -> None:
    assert not Verdict("y", NAN, 0.0, 1.0).passed
    assert not Verdict("y", 0.0, 0.0, NAN).passed
    assert "FAILED" in str(Verdict("y", 1.0, 0.0, 0.5))
    assert "ok" in str(Verdict("y", 0.1, 0.0, 0.5))


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
    st.integers(0, 7),
    st.sampled_from([NAN, INF, -INF]),
)
def test_judge_catches_one_bad_entry_anywhere(values: list[float], at: int, bad: float) -> None:
    torchs = torch.tensor(values)
    ours = torchs.clone()
    ours[at % len(values)] = bad
    assert not judge("y", ours, torchs, torchs.double()).passed
    assert judge("y", torchs, torchs, torchs.double()).passed


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)],
)
def test_unit_rounding(dtype: torch.dtype, bits: int) -> None:
    assert unit_rounding(dtype) == math.ldexp(1.0, -bits)


def test_other_side_reaches_as_far_as_the_forward_rule_allows() -> None:
    pre = torch.tensor([1.0, 2e-7, 2.1e-7, -2e-7, -1.0, 0.0], dtype=torch.float64)
    exact = pre.relu()
    torchs = tensor(1.0, 3e-7, 2.1e-7, 0.0, 0.0, 0.0)  # the largest error is 1e-7
    own = tensor(0.0, 0.0, 0.0, 1e-7, 1.0, 1e-9)
    expected = [False, True, False, True, False, True]
    assert other_side(pre, exact, torchs, own).tolist() == expected
    assert not other_side(pre, exact, torchs, own, factor=1)[1]
    assert not other_side(pre, exact, torchs, exact).any()
    assert not other_side(pre, exact, torchs * INF, own).any()
    assert other_side(pre[:0], exact[:0], torchs[:0], own[:0]).shape == (0,)


class Chain:
    """Linear and relu, L times; ``near`` puts the first row of x onto the kinks of layer 0."""

    def __init__(self, dtype: torch.dtype, rows: int, width: int, near: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.redraw = lambda m: draw(m, width)
        self.x = draw(rows, width)
        self.weights = [draw(width, width) * width**-0.5 for _ in range(3)]
        self.biases = [draw(width) for _ in range(3)]
        if near:
            self.biases[0] = -F.linear(self.x[:1], self.weights[0])[0]

    def pre_activations(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            pre = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
            yield pre
            x = pre.relu()

    def grads(self, x: torch.Tensor, backwards: bool = False) -> list[torch.Tensor]:
        weights = [w.to(x.dtype).requires_grad_() for w in self.weights]
        y = x
        for weight, bias in zip(weights, self.biases, strict=True):
            if backwards:  # the same sums in another order
                y = F.linear(y.flip(1), weight.flip(1), bias.to(x.dtype)).relu()
            else:
                y = F.linear(y, weight, bias.to(x.dtype)).relu()
        return list(torch.autograd.grad(y.square().sum(), weights))

    def difference(self, x: torch.Tensor) -> float:
        return relative_error(self.grads(x, True)[0], self.grads(x)[0])

    def failures(self, x: torch.Tensor, scale: float = 1.0) -> int:
        ours, torchs, exact = self.grads(x, True), self.grads(x), self.grads(x.double())
        triples = zip(ours, torchs, exact, strict=True)
        return sum(not judge("dW", a * scale, t, o).passed for a, t, o in triples)


def test_clear_of_kinks_leaves_no_sign_to_rounding() -> None:
    chain = Chain(torch.float32, 8, 64, near=True)
    before = chain.x.clone()
    assert chain.difference(chain.x) > 1e-2
    assert chain.failures(chain.x, scale=1.001) < 3  # torch is wrong by its own signs
    x, left = clear_of_kinks(chain.x, chain.pre_activations, chain.redraw)
    assert left == 0
    assert torch.equal(chain.x, before)
    assert (x != before).any(1).tolist()[0]
    assert torch.equal(x[1:], before[1:])
    assert chain.difference(x) < 1e-6
    assert chain.failures(x) == 0
    assert chain.failures(x, scale=1.00001) == 3


def test_silent_at_kinks_takes_the_side_out_of_wide_rows() -> None:
    """Two roundings of a pre-activation disagree about its sign; the gradients no longer do."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s).bfloat16() for s in ((64, 100), (4096, 100), (4096,)))
    w, dy = w / 10, torch.randn(64, 4096).bfloat16()
    exact = F.linear(x.double(), w.double(), b.double())
    once, twice = F.linear(x, w, b), x @ w.t() + b

    def grad(pre: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return (dy.double() * (pre > 0)) @ w.double()

    assert relative_error(grad(twice, dy), grad(exact, dy)) > 0.01
    silent = silent_at_kinks(dy, exact, once)
    assert 0 < int((silent == 0).sum()) < 0.1 * dy.numel()
    assert torch.equal(silent[silent != 0], dy[silent != 0])
    for pre in (once, twice):
        assert relative_error(grad(pre, silent), grad(exact, silent)) < 1e-12


def test_clear_of_kinks_gives_up_where_kinks_are_everywhere() -> None:
    chain = Chain(torch.bfloat16, 256, 256, near=False)
    calls: list[int] = []

    def redraw(m: int) -> torch.Tensor:
        calls.append(m)
        return chain.redraw(m)

    _, left = clear_of_kinks(chain.x, chain.pre_activations, redraw)
    assert left == 256
    assert not calls
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    x, left = clear_of_kinks(x, lambda r: [r], lambda m: torch.zeros(m, 256, dtype=x.dtype))
    assert left == 3
    assert clear_of_kinks(x[:0], lambda r: [r], chain.redraw)[1] == 0


def test_silent_at_kinks_hides_no_overflow() -> None:
    dy, exact = torch.ones(2, 2).half(), torch.full((2, 2), 1e6, dtype=torch.float64)
    assert torch.equal(silent_at_kinks(dy, exact, exact.half()), dy)


# --------------------------------------------------------------------------------------------
# Draws


def lone(draw: int, errors: tuple[float, ...], names: Sequence[str]) -> dict[str, list[Verdict]]:
    """One number each, as a gradient of one bias is: PyTorch's error and ours are of one size, or
    ours as many times as large."""
    generator = torch.Generator().manual_seed(draw)
    exact, *roundings = torch.randn(2 + len(errors), generator=generator).double()
    theirs = (exact + 1e-5 * roundings[0]).float()
    found = {}
    for times, rounding in zip(errors, roundings[1:], strict=True):
        ours = (exact + 1e-5 * times * rounding).float()
        if str(times) in names:
            found[str(times)] = [judge("db", ours[None], theirs[None], exact[None])]
    return found


def test_several_draws_are_judged_as_one_result() -> None:
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(5, 7, generator=generator).double()
    oracle[2] *= 1e-3  # its errors are relative to little
    theirs = (oracle + 1e-4 * torch.randn(5, 7, generator=generator)).float()
    ours = (oracle + 1e-4 * torch.randn(5, 7, generator=generator)).float()
    each = [judge("y", *three) for three in zip(ours, theirs, oracle, strict=True)]
    whole, once = pooled(each), judge("y", ours, theirs, oracle)
    assert whole.error == pytest.approx(once.error)
    assert whole.torch_error == pytest.approx(once.torch_error)
    assert whole.limit == pytest.approx(once.limit, rel=1e-2)
    assert whole.limit <= once.limit * (1 + 1e-12)
    assert (whole.numbers, whole.passed) == (35, True)
    assert pooled(each[:1]) == each[0]
    nothing = judge("y", *[torch.zeros(3)] * 2, torch.zeros(3).double())
    wrong = judge("y", torch.ones(3), torch.zeros(3), torch.zeros(3).double())
    assert pooled([nothing, wrong]).error == pytest.approx(3**0.5)


def test_luck_on_one_draw_is_told_from_a_large_error() -> None:
    """Of one number each: equal errors fail on many first draws and on none over all, errors six
    times as large on all."""
    alone = [lone(seed, (1.0,), ("1.0",))["1.0"][0].passed for seed in range(0, 3000, 100)]
    assert 3 < alone.count(False) < 20
    for seed in range(0, 3000, 100):
        asked: list[int] = []

        def again(draw: int, names: Sequence[str], seed: int = seed) -> Any:
            asked.append(draw)  # noqa: B023 - of this seed
            return lone(seed + draw, (1.0, 6.0), names)

        first = lone(seed, (1.0, 6.0), ("1.0", "6.0"))
        found = over_draws(first, again)
        assert found["1.0"][0].passed
        if not first["6.0"][0].passed:
            assert not found["6.0"][0].passed
            assert asked == list(range(1, len(asked) + 1))
        if first["1.0"][0].passed and first["6.0"][0].passed:
            assert not asked


def test_draws_end_where_nothing_is_in_doubt() -> None:
    exact = torch.ones(8).double()
    right = judge("y", exact.float(), exact.float(), exact)
    gross = judge("y", exact.float() * 1.5, exact.float(), exact)
    shape = judge("y", torch.ones(1, 8), exact.float(), exact)
    over = judge("y", exact.float() * (1 + 2e-7), exact.float(), exact)
    blank = replace(right, unproven="no number is finite", error=float("inf"))
    kinds = {"right": right, "gross": gross, "shape": shape, "over": over, "blank": blank}
    asked: dict[str, int] = dict.fromkeys((*kinds, "once"), 0)

    def again(_: int, names: Sequence[str]) -> dict[str, list[Verdict]]:
        for name in names:
            asked[name] += 1
        return {name: [kinds.get(name, right)] for name in names}

    found = over_draws({**{name: [v] for name, v in kinds.items()}, "once": [over]}, again)
    expected = {"right": 0, "gross": 7, "shape": 0, "over": DRAWS - 1, "blank": 0, "once": 15}
    assert asked == expected
    passed = [name for name, (verdict,) in found.items() if verdict.passed]
    assert passed == ["right", "once"]
    assert found["blank"] == [blank]
