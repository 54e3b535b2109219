"""Which launches of Triton kernels the compiled door takes."""

from __future__ import annotations

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
        (PLAIN | {"y": ("*fp32", "*fp32")}, {}, False),
        (PLAIN | {"M": ("i32", "i32")}, {}, False),
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
