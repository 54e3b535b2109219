"""diagonal_linear into memory of the caller's: values, checks, and the way without Python."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.spec import OUT
from fastlinear.fastpath import autograd_node, lookup

BACKENDS = (None, "eager", "addcmul", "cpp")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def exact(x: Tensor, w: Tensor, b: Tensor, name: str, r: Tensor | None) -> Tensor:
    """The oracle's value, rounded."""
    given = [None if t is None else t.double() for t in (x, w, b, r)]
    return reference.diagonal_linear(*given[:3], name, given[3]).to(x.dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_takes_the_result(backend: str | None) -> None:
    for name in ("none", "silu", "gelu"):
        x, w, b, r = draw(40, 30), draw(30), draw(30), draw(40, 30)
        out = torch.full((40, 30), float("nan"))
        y = fl.diagonal_linear(x, w, b, activation=name, residual=r, out=out, backend=backend)
        assert y is out
        torch.testing.assert_close(out, exact(x, w, b, name, r))


def test_out_that_does_not_fit_is_refused() -> None:
    x, w, b = draw(4, 3), draw(3), draw(3)
    memory = torch.empty(40)
    cases = [
        (x, "apart from every input"),
        (x[:2], "out of shape"),
        (torch.empty(4, 3).double(), "out of shape"),
        (torch.empty(3, 4).t(), "contiguous out"),
        (torch.empty(1, 3).expand(4, 3), "contiguous out"),
        ("y", "out to be a tensor"),
    ]
    for out, words in cases:
        with pytest.raises(InputError, match=words):
            fl.diagonal_linear(x, w, b, out=out)
    inside = memory[3:15].view(4, 3)
    with pytest.raises(InputError, match="apart from every input"):
        fl.diagonal_linear(inside, w, out=memory[:12].view(4, 3))
    with pytest.raises(InputError, match="no gradients"):
        fl.diagonal_linear(x, w.requires_grad_(), out=torch.empty(4, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_out_held_is_known_to_be_gone(backend: str | None) -> None:
    """A backward that has kept what lay in ``out`` must not read the new values."""
    x, w, b, p, out = draw(4, 3), draw(3), draw(3), draw(4, 3).requires_grad_(), draw(4, 3)
    z = (p * out).sum()
    with torch.no_grad():
        fl.diagonal_linear(x, w, b, activation="relu", out=out, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    with torch.inference_mode():
        fl.diagonal_linear(x, w, b, out=torch.empty(4, 3), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "gelu"])
def test_out_through_the_fast_path(backend: str | None, name: str) -> None:
    """The same values, checks and version as in Python, and without Python where a tape is."""
    if not (lookup.wait(120) and autograd_node.wait(300)):
        pytest.skip("no compiled fast path here")
    for rows, residual in itertools.product((4, 40), (False, True)):
        w, b = draw(30), draw(30)
        for turn in range(4):
            x, r = draw(rows, 30), draw(rows, 30) if residual else None
            out = torch.full((rows, 30), float("nan"))
            y = fl.diagonal_linear(x, w, b, name, r, out=out, backend=backend)
            assert y is out
            assert out._version >= 1
            torch.testing.assert_close(out, exact(x, w, b, name, r))
            if turn < 2:
                continue
            memory, call = draw(2 * rows, 30), partial(fl.diagonal_linear, backend=backend)
            with pytest.raises(InputError, match="apart from every input"):
                call(memory[1:][:rows], w, b, name, r, out=memory[:rows])
            if r is not None:
                with pytest.raises(InputError, match="apart from every input"):
                    call(x, w, b, name, r, out=r)
    with torch.inference_mode():
        out = torch.empty(4, 30)
        for _ in range(3):
            fl.diagonal_linear(draw(4, 30), w, b, name, out=out, backend=backend)


def test_calls_into_out_need_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (lookup.wait(120) and autograd_node.wait(300)):
        pytest.skip("no compiled fast path here")
    x, w, b, out = draw(7, 30), draw(30), draw(30), torch.empty(7, 30)
    for backend in ("cpp", "addcmul"):
        for _ in range(2):
            fl.diagonal_linear(x, w, b, out=out, backend=backend)
        monkeypatch.setattr(OUT, "looked_up", None)
        fl.diagonal_linear(x, w, b, out=out, backend=backend)
        monkeypatch.undo()


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_that_is_a_negative_view(backend: str | None) -> None:
    x, w, b = draw(4, 3), draw(3), draw(3)
    out = torch._neg_view(torch.empty(4, 3))
    fl.diagonal_linear(x, w, b, activation="silu", out=out, backend=backend)
    torch.testing.assert_close(out.clone(), exact(x, w, b, "silu", None))


@pytest.mark.parametrize("way", ["autocast", "vmap", "compile"])
def test_out_is_checked_on_every_way(way: str) -> None:
    x, w, r = draw(4, 8), draw(8), draw(4, 8)
    wanted = torch.float32
    good = torch.empty(4, 8, dtype=wanted)

    def run(out: Any, residual: Any = r) -> Any:
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return fl.diagonal_linear(x, w, residual=residual, out=out)
        if way == "vmap":
            return torch.vmap(lambda t: fl.diagonal_linear(t, w, out=out))(x[None])
        torch.compiler.reset()
        call = torch.compile(fl.diagonal_linear, backend="eager")
        return call(x, w, residual=residual, out=out)

    if way != "vmap":
        torch.testing.assert_close(run(good), good)
    errors = InputError if way == "autocast" else (InputError, RuntimeError)  # torch's at times
    for bad in (torch.empty(2, 4, 8), torch.empty(4, 8, dtype=torch.int32), x, r):
        before = bad.clone()
        with pytest.raises(errors):
            run(bad)
        assert torch.equal(bad.nan_to_num(), before.nan_to_num())
