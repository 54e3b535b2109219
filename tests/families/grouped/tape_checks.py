"""Calls of grouped_linear in Python and as tapes, side by side, and a driver for a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.dispatch.backend import family
from fastlinear.families.grouped.autograd import Formula, GroupedLinear
from fastlinear.families.grouped.spec import _inference as inference_plan
from fastlinear.fastpath import autograd_node, lookup, recorded
from fastlinear.native import cuda_driver as driver

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("... (g k)", "... g k", "g ... k", "b (g k) ...", "b g k ...")
ALL = (True, True, True)


def shape_of(layout: str, groups: int, k: int, tokens: tuple[int, int]) -> tuple[int, ...]:
    a, b = tokens
    return {
        "... (g k)": (a, b, groups * k),
        "... g k": (a * b, groups, k),
        "g ... k": (groups, a * b, k),
        "b (g k) ...": (a, groups * k, b),
        "b g k ...": (a, groups, k, b),
    }[layout]


def draw(
    layout: str,
    sizes: tuple[int, int, int],
    tokens: tuple[int, int] = (3, 16),
    needs: Sequence[bool] = ALL,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> list[Tensor | None]:
    """x, weight (G, N, K), bias."""
    groups, k, n = sizes

    def one(shape: tuple[int, ...], scale: float, need: bool) -> Tensor:
        t = torch.randn(shape, device=DEVICE) * scale
        return t.to(dtype).requires_grad_(need)

    x = one(shape_of(layout, groups, k, tokens), 1.0, needs[0])
    b = one((groups, n), 1.0, needs[2]) if bias else None
    return [x, one((groups, n, k), k**-0.5, needs[1]), b]


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert (s.shape, s.stride()) == (t.shape, t.stride())
            assert torch.equal(s, t), (s - t).abs().max()


def formula_of(forward: str, backward: str, activation: str, layout: str) -> Formula:
    def loaded(piece: str, name: str) -> Any:
        (found,) = [b for b in family("grouped_linear").candidates(piece) if b.name == name]
        return found.load()

    run, back = loaded("forward", forward), loaded("backward", backward)
    return Formula(activation, layout, forward, backward, run, back)


class Way:
    """Calls of one formula through the fast path; ``python`` says whether it may run in Python."""

    def __init__(self, formula: Formula, given: Sequence[Any]) -> None:
        self.python = True
        self.plain = formula

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                assert self.python, "in Python"
                return function(*arguments, **named)

            return run

        run, backward = watched(formula.run), watched(formula.backward)
        self.formula = replace(formula, run=run, backward=backward)
        table = lookup.table("grouped_linear.test")
        assert table is not None
        self.table = table
        table.clear()
        GroupedLinear.apply(*given, self.formula)
        plan = recorded.node(self.formula, *given)
        assert plan is not None
        assert table.admit(*given, "a", plan)

    def __call__(self, given: Sequence[Tensor | None]) -> Tensor:
        y = self.table.call(*given, "a")
        assert y is not None
        assert y.grad_fn.name() == Formula.node
        return y  # type: ignore[no-any-return]

    def compare(self, given: Sequence[Tensor | None]) -> None:
        """Once in Python, then by tapes alone."""
        wanted = [t for t in given if t is not None and t.requires_grad]
        expected = GroupedLinear.apply(*given, self.plain)
        for self.python in (True, False):
            dy = torch.randn_like(expected)
            before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
            y = self(given)
            same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])

    def stays_in_python(self, given: Sequence[Tensor | None]) -> None:
        with pytest.raises(AssertionError, match="in Python"):
            self.compare(given)


def fails(*_: Any) -> Any:
    raise AssertionError("in Python")


def compare_inference(backend: str, activation: str, layout: str, given: Sequence[Any]) -> None:
    """A call without gradients: a tape's result against Python's."""
    table = lookup.table("grouped_linear.test")
    assert table is not None
    table.clear()
    forward = inference_plan(
        formula_of(backend, "eager", activation, layout).run, activation, layout
    )
    python = True

    def run(*given: Any) -> Tensor:
        assert python, "in Python"
        return forward(*given)

    with torch.no_grad():
        expected = run(*given)
        plan = recorded.inference(run, *given)
        assert plan is not None
        assert table.admit(*given, "a", plan)
        python = False
        same([table.call(*given, "a")], [expected])


def copied_on_a_gpu(t: Tensor, order: str) -> bool:
    """``reference.copied``"""
    return t.shape[0] > 1 and order == "channels"


# ---------------------------------------------------------------- stand-ins


def at(address: int, like: Tensor | None) -> Tensor | None:
    """A tensor laid out as ``like`` at an address; None for null."""
    if like is None or not address:
        return None
    pairs = zip(like.shape, like.stride(), strict=True)
    count = 1 + sum((n - 1) * s for n, s in pairs)
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


STANDS: dict[int, Any] = {}


def stood(run: Callable[[], None], slots: Any) -> tuple[int, int, int]:
    """The driver's handle of a kernel, its configuration and its slots, all kept."""
    config = driver._LaunchConfig()
    handle = 1 + len(STANDS)
    STANDS[handle] = run, slots, config
    return handle, ctypes.addressof(config), ctypes.addressof(slots)


@contextmanager
def python_driver() -> Iterator[None]:
    """A driver that runs Python functions on a CPU's memory."""
    if torch.cuda.is_available():
        pytest.skip("the library has the driver itself")
    pointer = ctypes.c_void_p

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)
    def launch(_config: int, handle: int, slots: int, _: int) -> int:
        run, held, _ = STANDS[handle]
        assert slots == ctypes.addressof(held)
        with torch.no_grad():
            run()
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 2)
    def replace(where: int, address: int) -> int:
        ctypes.c_uint64.from_address(where).value = address
        return 0

    library = autograd_node._build.loaded
    assert library is not None
    library.fastlinear_node_cuda(None, ctypes.cast(launch, pointer), ctypes.cast(replace, pointer))
    yield
    table = lookup.table("grouped_linear.test")
    assert table is not None
    table.clear()
    library.fastlinear_node_cuda(None, None, None)
    STANDS.clear()
