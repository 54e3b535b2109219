"""Backend padded: copies to whole multiples of 16 features, cut again, and when it should pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice
from fastlinear.families.linear import padded, padded_problem, reference, selection
from fastlinear.families.linear.problem import problem

SIZES = [(6, 32, 48), (5, 7, 9), (33, 31, 48), (8, 64, 17), (1, 1, 1), (40, 100, 30), (3, 15, 16)]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The sizes of every product that dispatch was asked for."""
    seen: list[tuple[Any, ...]] = []
    real = padded.select
    padded._chosen.clear()

    def watching(p: Any) -> Any:
        seen.append((p.piece, p.dim("M"), p.dim("K"), p.dim("N")))
        return real(p)

    monkeypatch.setattr(padded, "select", watching)
    return seen


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def up(size: int) -> int:
    return (size + 15) // 16 * 16


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_of_padded_rows_are_those_of_the_rows(
    sizes: tuple[int, int, int], dtype: torch.dtype, inner: list[tuple[Any, ...]]
) -> None:
    m, k, n = sizes
    x, w, b, dy = (draw(*s, dtype=dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    laid = (w, w.t().contiguous().t(), torch.stack([w, w], 2)[..., 0])
    for weight in laid:
        for bias in (b, None):
            for activation, save in (("gelu_tanh", True), ("relu", False), ("sigmoid", False)):
                y, pre = padded.forward(x, weight, bias, activation, save)
                _same(y, reference.forward, (x, weight, bias, activation, save), 0)
                assert (pre is None) is not save
                if pre is not None:
                    _same(pre, reference.forward, (x, weight, bias, activation, save), 1)
        _same(padded.grad_input(dy, weight), reference.grad_input, (dy, weight))
    wide = torch.stack([x, x], 2)[..., 0]
    for rows in (x, wide):
        _same(padded.grad_weight(dy, rows), reference.grad_weight, (dy, rows))
    assert {s[1:] for s in inner} == {(m, up(k), up(n))}
    assert {s[0] for s in inner} == {"forward", "grad_input", "grad_weight"}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_the_whole_backward(
    activation: str, sizes: tuple[int, int, int], dtype: torch.dtype, inner: list[tuple[Any, ...]]
) -> None:
    m, k, n = sizes
    x, w, dy, saved = (draw(*s, dtype=dtype) for s in ((m, k), (n, k), (m, n), (m, n)))
    given = dy, None if activation == "none" else saved, x, w, activation
    for needs in ((True, True, True), (False, True, False), (True, False, True)):
        got = padded.backward(*given, needs)
        assert [g is not None for g in got] == list(needs)
        for i, one in enumerate(got):
            if one is not None:
                _same(one, reference.backward, (*given, (True, True, True)), i)
    assert {s[1:] for s in inner} == {(m, up(k), up(n))}


def _same(got: Tensor, plain: Any, arguments: tuple[Any, ...], which: int | None = None) -> None:
    def of(result: Any) -> Tensor:
        found: Tensor = result if which is None else result[which]
        return found

    high = tuple(a.double() if isinstance(a, Tensor) else a for a in arguments)
    torchs = of(plain(*arguments))
    assert got.shape == torchs.shape
    assert got.is_contiguous()
    assert got.dtype == torchs.dtype
    assert judge("padded", got, torchs, of(plain(*high))).passed


def test_nothing_of_the_callers_is_written(inner: list[tuple[Any, ...]]) -> None:
    x, w, b = draw(5, 32), draw(17, 32), draw(17)
    before = [t.clone() for t in (x, w, b)]
    y, _ = padded.forward(x, w, b, "relu", False)
    y.add_(1.0)
    assert all(torch.equal(t, was) for t, was in zip((x, w, b), before, strict=True))


def posed(m: int, k: int, n: int, piece: str = "forward", **more: Any) -> Any:
    kind = {"dtype": "bfloat16", "device": "cuda", "activation": "relu"} | more
    return problem(piece, m, k, n, **kind)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("sizes", SIZES)
def test_copies_are_counted(
    sizes: tuple[int, int, int],
    layout: str,
    inner: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    for name in ("aligned_copy", "_cut"):
        real = getattr(padded, name)

        def counted(t: Tensor, *rest: Any, real: Any = real) -> Tensor:
            found: Tensor = real(t, *rest)
            made.append(found is not t)
            return found

        monkeypatch.setattr(padded, name, counted)
    m, k, n = sizes
    x, w, b, dy = draw(m, k), draw(n, k), draw(n), draw(m, n)
    if layout == "kn" and min(n, k) > 1:
        w = w.t().contiguous().t()
    calls = {
        "forward": lambda: padded.forward(x, w, b, "gelu", True),
        "grad_input": lambda: padded.grad_input(dy, w),
        "grad_weight": lambda: padded.grad_weight(dy, x),
    }
    for piece, run in calls.items():
        made.clear()
        run()
        p = posed(m, k, n, piece, activation="gelu", needs_grad=True, w_layout=layout)
        assert sum(made) == sum(map(bool, padded_problem.copied(p, odd_rows=False)))


def test_it_serves_what_does_not_lie_well() -> None:
    reason_not = padded_problem.reason_not
    assert reason_not(posed(8, 100, 64)) is None
    assert reason_not(posed(8, 64, 100)) is None
    assert "already" in str(reason_not(posed(8, 64, 96)))
    assert "already" in str(reason_not(posed(8, 64, 100), odd_rows=True))
    assert reason_not(posed(8, 64, 100, "grad_input"), odd_rows=True) is None
    assert reason_not(posed(8, 64, 100, "backward"), odd_rows=True) is None
    assert "nothing" in str(reason_not(posed(0, 100, 96)))
    assert reason_not(posed(8, 64, 96, x_layout="strided")) is None
    assert reason_not(posed(8, 64, 96, w_layout="strided")) is None
    assert "already" in str(reason_not(posed(8, 64, 96, w_layout="kn")))
    assert reason_not(posed(8, 64, 96, w_layout="kn"), odd_rows=True) is None
    assert "already" in str(reason_not(posed(8, 64, 96, "grad_input", x_layout="strided")))
    assert "copies" in str(reason_not(posed(1 << 20, 1000, 96)))
    for piece in ("forward", "grad_input", "grad_weight", "backward"):
        (one,) = [b for b in family("linear_act").candidates(piece) if b.name == "padded"]
        on_cpu = posed(8, 100, 64, piece, device="cpu")
        assert "CUDA" in str(one.reason_not(on_cpu))


@pytest.mark.parametrize("measured", [False, True])
def test_what_was_measured_of_the_pieces_comes_before_a_prediction(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole backward is predicted padded; pieces known to be fastest are not overruled."""
    p = posed(8192, 4095, 4095, needs_grad=True)
    assert "backward" in {q.piece for q in selection.tuning_order(p)}
    few = {q.piece for q in selection.tuning_order(posed(8192, 4096, 4096, needs_grad=True))}
    assert "backward" not in few

    def chosen(q: Any, forced: str | None = None, **_: Any) -> Any:
        name, source = forced or "eager", "tuned" if measured else "predicted"
        if q.piece == "backward":
            name, source = "padded", "predicted"
        (backend,) = [b for b in family("linear_act").candidates(q.piece) if b.name == name]
        return Choice(q, backend, source, "", ())

    monkeypatch.setattr(selection, "select", chosen)
    found = [(c.problem.piece, c.backend.name) for c in selection.select_pieces(p)]
    if measured:
        assert ("grad_input", "eager") in found
    else:
        assert found == [("forward", "eager"), ("backward", "padded")]
