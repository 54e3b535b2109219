"""The recorder: what steps it makes of what a backend does, and what it refuses."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fastlinear.fastpath import recorder
from fastlinear.fastpath.launch import FastpathLaunch


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def recorded(function: Any, *given: Tensor | None) -> tuple[Any, ...]:
    found = recorder.record(function, given)
    assert found is not None
    return found


def test_ops_of_pytorch_views_and_results() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = functional.linear(x, w, b)
        return torch.relu(y), y.t().contiguous(), x @ w.t(), x[:, 1:].sum((0,))

    steps, results, *_ = recorded(function, draw(4, 6), draw(5, 6), draw(5))
    assert steps == (
        ("linear", 3, 0, 1, 2),
        ("aten", 4, "aten::relu", "", (3,)),
        ("strided", 5, 3, (5, 4, 1, 5)),
        ("dense", 6, 5),
        ("mm", 7, 0, 0, 1, 1),
        ("strided", 8, 0, (4, 5, 6, 1, 1)),
        ("sum", 9, 8, (0,)),
    )
    assert results == (4, 6, 7, 9)


def test_new_memory_has_the_shape_of_the_result() -> None:
    """A result in another shape than it was made costs no step."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.empty(4, 6)
        torch.mm(x, x, out=made.view(6, 4)[:4, :4])
        zeros = x.new_zeros(3)
        return made.view(2, 12), zeros

    steps, results, *_ = recorded(function, draw(4, 4))
    assert steps[0] == ("empty", 1, 6, 0, (4, 6))  # a piece of it was asked for first
    assert [s[0] for s in steps] == ["empty", "strided", "aten", "empty", "aten", "view"]

    def in_place(x: Tensor) -> tuple[Tensor, None]:
        made = torch.empty(4, 6).view(2, 12)
        made.copy_(x)
        return made, None

    steps, results, *_ = recorded(in_place, draw(1))
    assert (steps, results) == ((("empty", 1, 6, 0, (2, 12)), ("copy", 1, 0)), (1, -1))


def test_what_is_given_is_left_as_it_was() -> None:
    """A given tensor that is written to is claimed, and not written to while recording."""
    x, out = draw(3, 4), draw(3, 4)
    before = out.clone()

    def function(x: Tensor, out: Tensor) -> tuple[Tensor]:
        return (torch.addcmul(x, x, x, out=out),)

    steps, results, *_ = recorded(function, x, out)
    assert steps == (("claim", 1), ("addcmul", 1, 0, 0, 0))
    assert results == (1,)
    assert torch.equal(out, before)


def test_tensors_in_one_memory_are_told_apart() -> None:
    x = draw(3, 3)
    steps, *_ = recorded(lambda a, b: (a + b,), x, x)
    assert steps == (("aten", 2, "aten::add", "Tensor", (0, 1, (1,))),)


def test_calls_of_compiled_libraries() -> None:
    """Numbers, memory, null, and objects that must stay; nothing is called."""

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    def function(*_: Any) -> None:
        raise AssertionError("called")

    described = (ctypes.c_int64 * 2)(1, 2)

    def run(x: Tensor) -> tuple[Tensor]:
        y = torch.empty_like(x)
        recorder.run(function, described, x[:, 1:], None, 7)
        assert recorder.attempt(function, y)
        return (y,)

    steps, _, _, owners, *_ = recorded(run, draw(3, 4))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert steps[1:] == (
        ("strided", 2, 0, (3, 3, 4, 1, 1)),
        ("call", address, (ctypes.addressof(described), (2,), (-1,), 7)),
        ("attempt", address, ((1,),)),
    )
    assert owners == [described]


def test_lists_of_tensors_for_arrays() -> None:
    """As addresses, of which some are null, and as numbers of a tape."""
    array, found = ctypes.POINTER(ctypes.c_void_p), list[int | None]()

    @ctypes.CFUNCTYPE(None, array, ctypes.c_void_p)
    def function(addresses: Any, _: int) -> None:
        found.extend(addresses[:3])

    x, y = draw(3, 4), draw(2)
    recorder.run(function, [x[:, 1:], None, y], x)
    assert found == [x.data_ptr() + 4, None, y.data_ptr()]
    run = partial(recorder.run, function)
    steps, *_ = recorded(lambda x, y: (run([y, None, x[:, 1:]], x), x)[1:], x, y)
    assert steps[1][2] == ([1, -1, 2], (0,))
    assert found[3:] == []


def test_results_that_are_pieces_of_one_memory() -> None:
    def function(x: Tensor, unused: None) -> tuple[Tensor | None, ...]:
        whole, other = torch.empty(40), x.t().contiguous()
        y, z = whole[8:20].view(3, 4), whole.as_strided((0, 5), (5, 1), 32)
        recorder.run(CALLED, whole, y)
        return y, None, other[1:], z

    found = recorder.record(function, [draw(3, 4), None], pieces=True)
    assert found is not None
    (steps, results, *_), pieces = found
    assert [s[0] for s in steps] == ["empty", "strided", "dense", "strided", "call"]
    assert pieces == ((2, (3, 4), 8), None, (4, (3, 3), 3), (2, (0, 5), 32))
    assert results == (2, 4)
    for unlike in (lambda x: (x[1:],), lambda x: (torch.empty(4, 4).t(),)):
        assert recorder.record(unlike, [draw(3, 4)], pieces=True) is None


@ctypes.CFUNCTYPE(None)
def CALLED() -> None:
    raise AssertionError("called")


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + ONES,),
        lambda x: tuple(torch.max(x, 0)),
        lambda x: (torch.cat([x, x]),),
        lambda x: (x.view(torch.int32),),
        lambda x: (torch.empty_like(x),),
        lambda x: (x * x.sum().item(),),
    ],
    ids=[
        *("neither given nor made", "two results", "a list of tensors", "another dtype"),
        *("a result that nothing writes to", "a number"),
    ],
)
def test_what_has_no_steps(function: Any) -> None:
    assert recorder.record(function, [draw(3, 4)]) is None


def test_nothing_records_afterwards() -> None:
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda x: (x * (1 // 0),), [draw(2)])
    assert recorder.active() is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_launches_on_memory_as_aligned_as_it_is() -> None:
    """What is given must stay as aligned, as far as the kernel asks; new memory always is."""
    places = [ctypes.c_void_p(0) for _ in "xyz"]

    def function(x: Tensor, y: Tensor) -> tuple[Tensor]:
        recording, made = recorder.active(), torch.empty_like(x)
        assert recording is not None
        tensors = [recording.memory(t) for t in (x[1:], y, made)]
        numbered = tuple((p, number) for p, (number, _) in zip(places, tensors, strict=True))
        offsets = tuple(offset for _, offset in tensors)
        launch = FastpathLaunch(1, 2, 3, numbered, None, offsets=offsets)
        recording.launch(launch, [3, recorder.ALIGNMENT, recorder.ALIGNMENT])
        return (made,)

    steps, results, masks, *_ = recorded(function, draw(3, 4), draw(5))
    assert steps[0] == ("empty", 2, 6, 0, (3, 4))
    kind, kernel = steps[1]
    assert (kind, kernel[:3], results, masks) == ("kernel", (1, 2, 3), (2,), (3, 15))
    assert [(tensor, offset) for _, _, tensor, offset in kernel[3]] == [(0, 16), (1, 0), (2, 0)]
    assert recorder.record(lambda x: recorder.active().launch(None) or (x,), [draw(2)]) is None  # type: ignore[union-attr]
