"""Which launches of Triton kernels the compiled fast path takes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fastlinear.kernels.triton import launch as triton_launch
from fastlinear.kernels.triton.launch import Launch
from fastlinear.native import cuda_driver


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
def test_only_plain_pointers_and_integers_go_through_the_fast_path(
    monkeypatch: pytest.MonkeyPatch,
    signature: dict[str, Any],
    metadata: dict[str, Any],
    served: bool,
) -> None:
    monkeypatch.setattr(triton_launch, "_DIRECT", True)
    launch = _launch(signature, (7, 64), **metadata)
    assert (launch.in_fastpath((0, 1)) is not None) is served


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
    found = launch.in_fastpath((0, (1, 2), (None, 3), 4))
    assert found is not None
    assert [number for _, number in found.tensors] == [0, 1, 2, 3, 4]
    _, slots, arguments, _ = found.memory
    assert [a.value for a in arguments] == [None] * 5 + [5, 9, None, None]
    places = {ctypes.addressof(argument) for argument, _ in found.tensors}
    assert places == set(slots[:5])
    assert _launch(PLAIN | {"M": ("fp32",)}, ((7,), 64)).in_fastpath((0, 1)) is None


def test_descriptors_are_the_maps_that_triton_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of the tensor's sizes, then these and its strides, as the kernel takes them."""
    monkeypatch.setattr(triton_launch, "_DIRECT", True)
    encoded: list[Any] = []

    def encode(pointer: Any, *rest: Any) -> int:
        encoded.append([list(r) if isinstance(r, ctypes.Array) else r for r in rest])
        return 0

    library = SimpleNamespace(
        cuTensorMapEncodeTiled=encode, cuTensorMapReplaceAddress=SimpleNamespace()
    )
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    monkeypatch.setattr(cuda_driver, "make_current", lambda _: None)
    facts = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
    meta = [{**facts, "block_size": [128, 64]}, {**facts, "block_size": [16, 32]}]
    signature = {
        "x": "tensordesc<bf16[128, 64]>",
        "b": "*bf16",
        "y": "tensordesc<bf16[16, 32]>",
        "pre": "constexpr",
        "M": "i32",
    }
    x = torch.empty(300, 256, dtype=torch.bfloat16)[:, :192]
    y = torch.empty(300, 96, dtype=torch.bfloat16, device="meta")
    launch = _launch(signature, (300,), tensordesc_meta=meta)
    found = launch.in_fastpath((4, 5, 6, None), {0: x, 2: y, 3: y})
    assert found is not None
    assert [number for _, number in found.tensors] == [4, 5, 6]
    _, slots, arguments, _ = found.memory
    values = [getattr(a, "value", "map") for a in arguments]
    shapes = [300, 192, 256, 1], [300, 96, 96, 1]
    assert values == ["map", *shapes[0], None, "map", *shapes[1], 300, None, None]
    assert slots[0] == arguments[0].pointer
    assert [kind for kind, *_ in found.kernel()[3]] == [1, 0, 1]
    kinds = [(e[0], e[1], e[2].value) for e in encoded]
    assert kinds == [(9, 2, x.data_ptr())] * 2
    assert encoded[0][3:] == [[192, 300], [512], [64, 128], [1, 1], 0, 3, 2, 0]
    assert encoded[1][3:] == [[96, 300], [192], [32, 16], [1, 1], 0, 3, 2, 0]
    assert _launch(signature, (300,), tensordesc_meta=meta).in_fastpath((4, 5, 6, None)) is None
    assert _launch(signature, (300,)).in_fastpath((4, 5, 6, None), {0: x, 2: y}) is None
