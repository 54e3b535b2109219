"""Two matrices side by side in rows that begin on 16 bytes: interpreted, and on a GPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted ones run in a process of
their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.mlp import join

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# columns of either: what a word has and has not, words' borders, tiles' borders, aligned results
COLUMNS = ((63, 256), (64, 256), (3, 128), (1, 1), (5, 7), (8, 8), (39, 24), (66, 68), (13, 3))


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN, so an element that is never written is seen; no plans are kept."""
    if INTERPRETED or ON_GPU:
        empty = Tensor.new_empty

        def poison(like: Tensor, *shape: Any, **options: Any) -> Tensor:
            return empty(like, *shape, **options).fill_(float("nan"))

        monkeypatch.setattr(Tensor, "new_empty", poison)
        join._plans.clear()


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(DEVICE, dtype)


def check(a: Tensor, b: Tensor) -> None:
    """Values and gradients, bit for bit; where rows begin."""
    given = [t.detach().requires_grad_() for t in (a, b)]
    shape = (*a.shape[:-1], a.shape[-1] + b.shape[-1])
    g = numbers(*shape, dtype=a.dtype, seed=2)
    y, expected = join.join(*given), torch.cat(given, -1)
    assert y.dtype is expected.dtype
    assert torch.equal(y, expected)
    found, theirs = (torch.autograd.grad(t, given, g) for t in (y, expected))
    assert all(map(torch.equal, found, theirs))
    assert torch.equal(join.join(a, b), expected)
    assert y.stride(-1) == 1
    assert y.data_ptr() % 16 == 0
    rows = y.reshape(-1, shape[-1])
    assert rows.data_ptr() == y.data_ptr()
    pitch = join.row_length(shape[-1], y.itemsize)
    if len(rows) > 1:
        assert rows.stride(0) == pitch
        assert pitch * y.itemsize % 16 == 0
    assert not rows.as_strided((len(rows), pitch), (pitch, 1))[:, shape[-1] :].any()


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_bits_of_any_size(columns: tuple[int, int], dtype: torch.dtype) -> None:
    for m in (1, 7, 70):
        a, b = (numbers(m, n, dtype=dtype, seed=n) for n in columns)
        check(a, b)
        check(b, a)


@compares
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(dtype: torch.dtype) -> None:
    m, n = 66, 24
    wide, even = numbers(m, 2 * n + 1, dtype=dtype), numbers(m, 2 * n, dtype=dtype)
    kinds = {
        "turned": numbers(n, m, dtype=dtype).t(),
        "rows of wider ones": wide[:, :n],
        "between words": wide[:, 1 : n + 1],
        "every second column": even[:, ::2],
        "columns that begin between words": even[:, 1 : n + 1],
        "rows of even ones": even[:, :n],
        "one row": numbers(1, n, dtype=dtype).expand(m, n),
        "one column": numbers(m, 1, dtype=dtype).expand(m, n),
        "joined before": join.join(numbers(m, 5, dtype=dtype), numbers(m, n - 5, dtype=dtype)),
    }
    other = numbers(m, 16, dtype=dtype, seed=1)
    for t in kinds.values():
        for beside in (other, wide[:, 3:8]):
            check(t, beside)
            check(beside, t)
    in_words = [name for name, t in kinds.items() if join._in_words(t)]
    assert in_words == ["rows of even ones", "one row", "joined before"]


@compares
def test_leading_dimensions_and_nothing() -> None:
    dtype = torch.bfloat16
    b = numbers(2, 3, 8, dtype=dtype, seed=1)
    check(numbers(2, 3, 5, dtype=dtype), b)
    check(numbers(3, 2, 5, dtype=dtype).transpose(0, 1), b)
    check(numbers(5, dtype=dtype), b[0, 0])
    for shape in ((0,), (2, 0, 3)):
        a, b = numbers(*shape, 5, dtype=dtype), numbers(*shape, 8, dtype=dtype)
        assert torch.equal(join.join(a, b), torch.cat((a, b), -1))
    a, b = numbers(4, 0, dtype=dtype), numbers(4, 8, dtype=dtype)
    assert torch.equal(join.join(a, b), b)


@compares
def test_signs_of_zeros_and_bits_of_nan_stay() -> None:
    for dtype, integers in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        bits = torch.randint(-(1 << 15), 1 << 15, (66, 40), device=DEVICE).to(integers)
        a, b = bits[:, :15].view(dtype), bits[:, 15:].contiguous().view(dtype)
        assert torch.equal(join.join(a, b).view(integers), bits)


@compares
def test_any_order_of_derivatives() -> None:
    a, b = (numbers(6, n, dtype=torch.float32).requires_grad_() for n in (5, 8))
    (ours, theirs) = (
        torch.autograd.grad(
            torch.autograd.grad(f(a, b).pow(3).sum(), (a, b), create_graph=True)[1].sum(), b
        )[0]
        for f in (join.join, lambda a, b: torch.cat((a, b), -1))
    )
    assert torch.equal(ours, theirs)
    y = join.join(a, b)
    batch = torch.randn(3, *y.shape, device=DEVICE)
    found = torch.autograd.grad(y, (a, b), batch, is_grads_batched=True)
    assert torch.equal(torch.cat(found, -1), batch)


@compares
def test_others_are_pytorchs() -> None:
    """Another dtype beside, float64, transforms, dual numbers, lazy signs."""
    a, b = (numbers(6, n, dtype=torch.float32) for n in (5, 8))

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a, b), -1)

    for x, h in ((a, b.bfloat16()), (a.double(), b.double()), (torch._neg_view(a), b)):
        y = join.join(x, h)
        assert y.is_contiguous()
        assert y.dtype is theirs(x, h).dtype
        assert torch.equal(y, theirs(x, h))
    assert torch.equal(torch.func.vmap(join.join)(a, b), theirs(a, b))
    found, expected = (torch.func.jvp(f, (a, b), (b[:, :5], b)) for f in (join.join, theirs))
    assert torch.equal(found[1], expected[1])
    with torch.autograd.forward_ad.dual_level():
        dual = join.join(torch.autograd.forward_ad.make_dual(a, b[:, :5]), b)
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        join.join(a, b[:3])
