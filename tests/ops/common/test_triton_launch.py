"""Which launches of Triton kernels the compiled door takes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fastlinear.ops.common import triton_launch
from fastlinear.ops.common.triton_launch import Launch


def _launch(signature: dict[str, Any], rest: tuple[Any, ...], **metadata: Any) -> Launch:
    launch = Launch(None, (4,), rest, torch.device("cuda", 0), warps=4)
    facts = {
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    launch._compiled = SimpleNamespace(
        metadata=SimpleNamespace(**facts | metadata),
        src=SimpleNamespace(signature=signature),
        packed_metadata=(4, 1, 1024),
        function=1234,
    )
    return launch


PLAIN: dict[str, Any] = {"x": "*fp32", "y": "*fp32", "M": "i32", "BLOCK": "constexpr"}


@pytest.mark.parametrize(
    ("signature", "metadata", "served"),
    [
        (PLAIN, {}, True),
        (PLAIN | {"M": "fp32"}, {}, False),
        (PLAIN, {"num_ctas": 2}, False),
        (PLAIN, {"launch_pdl": True}, False),
        (PLAIN, {"global_scratch_size": 128}, False),
    ],
)
def test_only_plain_pointers_and_integers_go_through_the_door(
    monkeypatch: pytest.MonkeyPatch,
    signature: dict[str, Any],
    metadata: dict[str, Any],
    served: bool,
) -> None:
    monkeypatch.setattr(triton_launch, "_DIRECT", True)
    launch = _launch(signature, (7, 64), **metadata)
    assert (launch.in_door((0, 1)) is not None) is served


def test_arguments_inside_of_tuples_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers by the tensors' numbers, integers by value; a None among them is no argument."""
    monkeypatch.setattr(triton_launch, "_DIRECT", True)
    signature = {
        "x": "*fp32",
        "ws": ("*fp32", "*fp32"),
        "bs": ("constexpr", "*fp32"),
        "y": "*fp32",
        "sizes": ("i32", "constexpr", "i32"),
    }
    launch = _launch(signature, ((5, 64, 9),))
    found = launch.in_door((0, (1, 2), (None, 3), 4))
    assert found is not None
    assert [number for _, number in found.tensors] == [0, 1, 2, 3, 4]
    _, slots, arguments, _ = found.memory
    assert [a.value for a in arguments] == [None] * 5 + [5, 9, None, None]
    places = {ctypes.addressof(argument) for argument, _ in found.tensors}
    assert places == set(slots[:5])
    assert _launch(PLAIN | {"M": ("fp32",)}, ((7,), 64)).in_door((0, 1)) is None
