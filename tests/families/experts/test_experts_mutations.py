"""Tests of the tests: broken passes must fail the comparison. And which backend serves a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.device import DeviceFacts
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import select
from fastlinear.families.experts import products
from fastlinear.families.experts.cpu import passes
from fastlinear.families.experts.problem import problem
from fastlinear.families.experts.spec import FRONT
from fastlinear.families.grouped.ragged.problem import problem as ragged
from fastlinear.native import cpp_build
from fastlinear.op.front import no_table
from tests.families.experts.expert_calls import check, drawn

HOPPER = DeviceFacts("cuda", "NVIDIA H100", "nvidia-h100", (9, 0), 132, "sm_90", 80 << 30, 50 << 20)
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def result(change: Callable[[Any], Any]) -> Change:
    """What a pass gives, changed."""
    return lambda run: lambda *a, **k: change(run(*a, **k))


def given(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    """What a pass is given, changed."""
    return lambda run: lambda *a: run(*change(a))


def first_row_left(t: Tensor) -> Tensor:
    t[0] = 0
    return t


def slots_swapped(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    order, place, sizes = found
    order = order.clone()
    order[[0, 1]] = order[[1, 0]]
    return order, place, sizes


def one_row_more(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    order, place, sizes = found
    sizes = sizes.clone()
    sizes[0] += 1
    sizes[1] -= 1
    return order, place, sizes


def scaled(at: int, by: float) -> Callable[[Any], Any]:
    def change(found: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(t * by if i == at and t is not None else t for i, t in enumerate(found))

    return change


MUTANTS: dict[str, tuple[str, Change]] = {
    "slots in another order": ("sort", result(slots_swapped)),
    "a row to another expert": ("sort", result(one_row_more)),
    "a row of x left out": ("gather", result(first_row_left)),
    "tokens by slot": ("gather", given(lambda a: (a[0], a[1] * 0, *a[2:]))),
    "no weights": ("combine", given(lambda a: a[:3])),
    "all places found": ("combine", given(lambda a: (a[0], a[1].clamp(min=0), *a[2:]))),
    "no limit": ("gate_forward", given(lambda a: (a[0], a[1]._replace(limit=float("inf"))))),
    "no offset": ("gate_forward", given(lambda a: (a[0], a[1]._replace(offset=0.0)))),
    "halves swapped": ("gate_forward", given(lambda a: (a[0], a[1]._replace(order="up_gate")))),
    "a backward without alpha": (
        "gate_backward",
        given(lambda a: (*a[:2], a[2]._replace(alpha=1.0), *a[3:])),
    ),
    "a backward without a limit": (
        "gate_backward",
        given(lambda a: (*a[:2], a[2]._replace(limit=float("inf")), *a[3:])),
    ),
    "a router without its bias": ("gate_backward", given(lambda a: (*a[:9], None, a[10]))),
    "weights once more": ("gate_backward", result(scaled(0, 1.01))),
    "h without weights": ("gate_backward", result(scaled(1, 1.01))),
}


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_broken_pass_is_found(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = drawn(23, 2, 4, 24, 16, limit=0.7, alpha=1.702, up_offset=1.0)
    monkeypatch.setattr(FRONT, "table", no_table)
    monkeypatch.setattr(FRONT, "plans", {})
    monkeypatch.setattr(FRONT, "_admit", lambda *_: None)
    expected, oracle = call.by_torch(), call.expected()
    if name is None:
        check(call.run("cpp"), expected, oracle, 2.0)
        return
    which, change = MUTANTS[name]
    monkeypatch.setattr(passes, which, change(getattr(passes, which)))
    with pytest.raises(AssertionError):
        check(call.run("cpp"), expected, oracle, 2.0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, for what is only asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER.capability)
    monkeypatch.setattr("fastlinear.core.device._cuda_facts", lambda _: HOPPER)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("piece", ["forward", "step"])
def test_a_gpu_takes_its_own_passes(piece: str) -> None:
    """Inside a CUDA graph as well, which PyTorch's own ops may not serve."""
    pytest.importorskip("triton")

    def chosen(dtype: str, captured: bool, **options: Any) -> str:
        facts = {"dtype": dtype, "device": "cuda", "captured": captured, "sizes": "device"}
        p = problem(piece, 512, 8, 2, 256, 128, needs_grad=piece == "step", **facts, **options)
        return select(p, ready=False).backend.name

    for captured in (False, True):
        assert (
            chosen("bfloat16", captured) == chosen("bfloat16", captured, recompute=True) == "triton"
        )
        assert chosen("float32", captured, precision="highest") == "triton"
    assert chosen("float64", False) == "eager"


@pytest.mark.usefixtures("hopper")
def test_products_on_a_gpu_never_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is predicted for ragged_linear, PyTorch's own ops read sizes."""
    monkeypatch.setattr(products, "select", lambda p: select(p, "eager"))
    facts = {"device": "cuda", "precision": "highest"}
    for piece in ("forward", "step"):
        for rows, dtype in ((8, "bfloat16"), (32768, "bfloat16"), (32768, "float32")):
            p = ragged(
                piece, rows, 64, 2048, 1408, dtype=dtype, needs_grad=piece == "step", **facts
            )
            able = {b.name for b in family(p.family).candidates(piece) if b.reason_not(p) is None}
            assert products._chosen.__wrapped__(p) in able - {"eager"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_cpu_takes_its_own_passes(dtype: str) -> None:
    p = problem("forward", 512, 8, 2, 256, 128, dtype=dtype, device="cpu")
    expected = "eager" if dtype == "float64" or cpp_build.reason_not() else "cpp"
    assert select(p, ready=False).backend.name == expected
