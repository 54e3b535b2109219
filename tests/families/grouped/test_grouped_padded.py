"""Backend padded of groups: dense copies in whole multiples of 16 features, and results cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.dispatch.backend import family
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import padded, reference
from fastlinear.families.grouped.problem import NAME, lies_well, problem

SIZES = [(1, 6, 3, 32, 48), (2, 5, 2, 7, 9), (3, 4, 3, 31, 16), (1, 1, 1, 1, 1), (4, 1, 2, 17, 3)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every Problem that dispatch was asked for."""
    seen: list[Any] = []
    real = padded.select
    padded._chosen.clear()
    monkeypatch.setattr(padded, "select", lambda p: (seen.append(p), real(p))[1])
    return seen


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tokens(shape: tuple[int, ...], order: str, dtype: torch.dtype, strided: bool) -> Tensor:
    drawn = draw(*shape, dtype=dtype)
    made = layouts.empty((*shape[:3], 2 * shape[3] if strided else shape[3]), order, drawn, dtype)
    return (made[..., ::2] if strided else made).copy_(drawn)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("order", layouts.ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_copies_change_no_result(
    sizes: tuple[int, ...], dtype: torch.dtype, order: str, strided: bool, inner: list[Any]
) -> None:
    batch, length, groups, k, n = sizes
    x = tokens((batch, length, groups, k), order, dtype, strided)
    dy = tokens((batch, length, groups, n), order, dtype, False)
    weight = draw(groups, n, k, dtype=dtype)
    if strided:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    bias = draw(groups, n, dtype=dtype)
    for given, activation, save in ((bias, "gelu_tanh", True), (None, "relu", False)):
        call = x, weight, given, activation, save, order
        y, pre = padded.forward(*call)
        assert layouts.is_dense(y, order)
        assert (pre is None) is not save
        close((y, pre), reference.forward, call)
        saved = pre if save else y
        back = dy, saved, x, weight, activation, (True, True, given is not None), order
        found = padded.backward(*back)
        assert found[0] is not None
        assert layouts.is_dense(found[0], order)
        close(found, reference.backward, back)
    assert {p.dim("K") for p in inner} == {-(-k // 16) * 16}
    assert {p.option("order") for p in inner} == {"groups" if order == "channels" else order}
    assert all(p.option("x") == p.option("w") == "dense" for p in inner)


def test_what_is_not_needed_is_not_there() -> None:
    x, dy = (tokens((1, 6, 3, d), "groups", torch.float32, False) for d in (7, 5))
    weight = draw(3, 5, 7, dtype=torch.float32)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = padded.backward(dy, None, x, weight, "none", needs, "groups")
        assert [t is not None for t in found] == list(needs)


@pytest.mark.parametrize(
    ("change", "well"),
    [
        ({}, True),
        ({"k": 40}, False),
        ({"x": "strided"}, False),
        ({"w": "strided"}, False),
        ({"order": "channels", "length": 4}, False),
        ({"order": "groups", "n": 7}, True),
    ],
)
def test_it_serves_what_lies_badly(change: dict[str, Any], well: bool) -> None:
    given: dict[str, Any] = {"m": 8, "groups": 2, "k": 32, "n": 16, "dtype": "float32"}
    p = problem("forward", **(given | {"device": "cuda"} | change))
    assert lies_well(p) is well
    (one,) = [b for b in family(NAME).candidates("forward") if b.name == "padded"]
    assert one.why_not_ready(p) is not None, "there is no GPU"


def close(found: Any, run: Any, call: tuple[Any, ...]) -> None:
    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) else t

    for mine, torchs, oracle in zip(found, run(*call), run(*map(wide, call)), strict=True):
        assert (mine is None) is (torchs is None)
        if mine is not None:
            assert mine.shape == torchs.shape
            assert judge("padded", mine, torchs, oracle).passed
