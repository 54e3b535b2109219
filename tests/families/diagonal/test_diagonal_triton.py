"""diagonal_linear's Triton backend against a float64 oracle: interpreted, and on a GPU.

The same comparisons serve both. Triton reads TRITON_INTERPRET when a kernel is defined, so the
interpreted ones run in a process of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.dispatch.backend import family
from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.op import diagonal_linear
from fastlinear.families.diagonal.problem import problem
from fastlinear.families.diagonal.triton.config import DiagonalConfig
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.diagonal.triton import backend


# (M, K): one launch and two, rows read side by side with a short last one, blocks with tails
SIZES = ((1, 1), (5, 33), (40, 100), (100, 24), (12, 700), (70, 64), (90, 3))
SMALL = DiagonalConfig(64, 512, 4, 1, 1)  # many tiles and strips at small sizes
DTYPES = ("float32", "bfloat16", "float16")
IN_A_ROW = 8.0  # NumPy adds one by one what a device adds in a tree


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results start as NaN, so an element that is never written is seen; no plans are kept."""
    if INTERPRETED or ON_GPU:
        for name in ("_empty", "_float32"):
            make = getattr(backend, name)
            monkeypatch.setattr(backend, name, lambda *a, make=make: make(*a).fill_(float("nan")))
        backend._plans.clear()
    yield
    if INTERPRETED or ON_GPU:
        backend._plans.clear()


def wrong(piece: str, inputs: tuple[Any, ...], **options: Any) -> list[str]:
    """Where the error exceeds twice torch's, or two runs differ."""
    ours = getattr(backend, piece)(*inputs, **options)
    again = getattr(backend, piece)(*inputs, **options)
    theirs = getattr(reference, piece)(*inputs)
    wide = (t.double() if isinstance(t, torch.Tensor) else t for t in inputs)
    oracle = getattr(reference, piece)(*wide)
    listed = ((t,) if isinstance(t, torch.Tensor) else t for t in (ours, again, theirs, oracle))
    found = []
    for i, (a, b, t, o) in enumerate(zip(*listed, strict=True)):
        assert (a is None) == (t is None)
        if a is not None:
            verdict = judge(str(i), a, t, o, factor=IN_A_ROW if INTERPRETED and i else 2.0)
            found += [] if verdict.passed else [str(verdict)]
            found += [] if torch.equal(a, b) else [f"{i}: two runs differ"]
    return found


def posed(piece: str, dtype: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every activation; sizes, layouts, biases and residuals take turns."""
    sizes = itertools.cycle(SIZES)
    turns = itertools.cycle(
        itertools.product(("rows", "rows_apart", "strided"), (True, False), (True, False))
    )
    for activation in NAMES if dtype != "float16" else ("none", "silu"):
        for _ in range(3 if ON_GPU else 2):
            x_layout, bias, residual = next(turns)
            p = problem(
                piece,
                *next(sizes),
                dtype=dtype,
                device=DEVICE,
                activation=activation,
                bias=bias,
                residual=residual,
                x_layout=x_layout,
            )
            made = family("diagonal_linear").make_inputs(p, torch.device(DEVICE), 0)
            yield p, made


@compares
def test_features_side_by_side_stay_so() -> None:
    p = problem("forward", 40, 100, dtype="float32", device=DEVICE, x_layout="strided")
    x, *rest = family("diagonal_linear").make_inputs(p, torch.device(DEVICE), 0)
    assert backend.forward(x, *rest).t().is_contiguous()
    out = torch.empty(40, 100, device=DEVICE)
    assert backend.forward(x, *rest[:-1], out) is out
    assert torch.equal(out, backend.forward(x, *rest))


@compares
@pytest.mark.parametrize("size", [(33, 21), (7, 50), (5, 301), (130, 17)], ids=str)
def test_features_of_odd_length_side_by_side(size: tuple[int, int]) -> None:
    how: Any = {"dtype": "float32", "device": DEVICE, "activation": "silu", "x_layout": "strided"}
    for residual in (True, False):
        p = problem("forward", *size, **how, residual=residual)
        inputs = family("diagonal_linear").make_inputs(p, torch.device(DEVICE), 0)
        for config in (None, SMALL):
            assert wrong("forward", inputs, config=config) == [], p.describe()


@compares
@pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "small"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_against_the_oracle(piece: str, dtype: str, config: DiagonalConfig | None) -> None:
    if INTERPRETED and config is None and dtype == "bfloat16":
        pytest.skip("interpreted with the small configuration only")
    for p, inputs in posed(piece, dtype):
        assert wrong(piece, inputs, config=config) == [], p.describe()


@compares
def test_every_set_of_wanted_gradients() -> None:
    for activation in ("none", "gelu"):
        p = problem("backward", 40, 100, dtype="float32", device=DEVICE, activation=activation)
        inputs = family("diagonal_linear").make_inputs(p, torch.device(DEVICE), 0)
        for needs in itertools.product((True, False), repeat=3):
            if any(needs):
                assert wrong("backward", (*inputs[:-1], needs), config=SMALL) == [], needs


@compares
def test_into_out_and_from_odd_addresses() -> None:
    memory = torch.randn(70 * 100 + 1, device=DEVICE)
    x, w = memory[1:].view(70, 100), torch.randn(101, device=DEVICE)[1:]
    out = torch.empty(70 * 100 + 3, device=DEVICE)[3:].view(70, 100)
    y = backend.forward(x, w, None, "none", None, out)
    assert y is out
    assert torch.equal(y, x * w)


@compares
def test_rows_of_stride_zero() -> None:
    x, w = torch.randn(1, 40, device=DEVICE).expand(33, 40), torch.randn(40, device=DEVICE)
    assert torch.equal(backend.forward(x, w, None, "none", None, None), x * w)


@compares
def test_no_rows() -> None:
    x, w = torch.empty(0, 40, device=DEVICE), torch.ones(40, device=DEVICE)
    assert backend.forward(x, w, w, "relu", None, None).shape == (0, 40)
    dx, dw, db = backend.backward(x, x, w, w, "relu", (True, True, True))
    assert dx.shape == (0, 40)
    assert torch.equal(dw, torch.zeros(40, device=DEVICE))
    assert torch.equal(db, torch.zeros(40, device=DEVICE))


if ON_GPU:

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("size", [(32768, 128), (32768, 160), (4099, 1025), (513, 24576)])
    def test_large_sums_keep_the_rule(size: tuple[int, int], dtype: str) -> None:
        for piece in ("forward", "backward"):
            p = problem(piece, *size, dtype=dtype, device="cuda", activation="gelu_tanh")
            inputs = family("diagonal_linear").make_inputs(p, torch.device("cuda"), 0)
            assert wrong(piece, inputs) == []

    @pytest.mark.gpu
    @pytest.mark.parametrize("activation", ["none", "silu"])
    def test_second_derivatives(activation: str) -> None:
        """Of calls as they are recorded in use, against PyTorch's own in float64."""
        given = [torch.randn(s, device="cuda") for s in ((500, 160), (160,), (160,))]

        def second(run: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            leaves = [t.detach().requires_grad_() for t in tensors]
            y = run(*leaves, activation, None)
            grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

        def ours(*args: Any) -> torch.Tensor:
            return diagonal_linear(*args[:3], activation=args[3])

        for _ in range(4):
            found = second(ours, given)
        theirs = second(reference.diagonal_linear, given)
        oracle = second(reference.diagonal_linear, [t.double() for t in given])
        for i, (f, t, o) in enumerate(zip(found, theirs, oracle, strict=True)):
            assert judge(str(i), f, t, o).passed, i


# NumPy cuts bfloat16 off where a device rounds it
_HALF = 2.0 ** (-7 if INTERPRETED else -8)
# dtype → largest relative error down to the given x, and the derivative's absolute error. Near -6.5
# the exponent of 2 is -34, whose rounding in float32, 1.9e-6, is most of the error there; the
# derivative is a sum of three numbers below 1.13.
GELU = {torch.float32: (4e-6, -6.5, 4e-7), torch.bfloat16: (_HALF * 1.01, -6.0, _HALF * 1.13)}


@compares
@pytest.mark.parametrize("dtype", GELU)
def test_gelu_far_below_zero(dtype: torch.dtype) -> None:
    """Small negative values are right to their last digits, where 1 + erf would cancel; and at the
    ends."""
    relative, least, absolute = GELU[dtype]
    x = torch.linspace(least, 12.0, 2048, device=DEVICE).to(dtype)[None]
    one, none = torch.ones(2048, device=DEVICE, dtype=dtype), torch.zeros_like(x[0])
    y = backend.forward(x, one, none, "gelu", None, None)
    oracle = 0.5 * x.double() * torch.erfc(-x.double() * 0.5**0.5)
    assert ((y - oracle) / oracle).abs().max() < relative
    dy = torch.ones_like(x)
    dx, _, _ = backend.backward(dy, x, one, none, "gelu", (True, False, False))
    exact = reference.backward(*(t.double() for t in (dy, x, one, none)), "gelu", (True,) * 3)
    assert dx is not None
    assert exact[0] is not None
    assert (dx - exact[0]).abs().max() < absolute
    ends = torch.tensor([[-1e30, -70.0, 70.0, 1e30, float("inf"), float("nan"), -0.0, 0.0]])
    ends = ends.to(DEVICE, dtype)
    y = backend.forward(ends, one[:8], none[:8], "gelu", None, None)
    expected = ends.where(ends > -70.0, 0.0).where(ends == ends, ends)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
