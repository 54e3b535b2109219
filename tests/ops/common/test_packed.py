"""Packed copies are made of weights that stay, not of views that a compiled graph makes anew."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.ops.common import packed, weight_hash
from fastlinear.ops.common.packed import Packs
from fastlinear.ops.linear_act import mkl, onednn, reference

pytestmark = pytest.mark.skipif(
    weight_hash.why_not_loaded() is not None, reason="no C++ compiler: nothing is kept"
)


def alias(weight: Tensor) -> Tensor:
    """The same memory as a tensor that nobody else knows."""
    return torch.empty(0).set_(  # type: ignore[call-overload, no-any-return]
        weight.untyped_storage(), 0, weight.shape, weight.stride()
    )


def test_owners_that_follow_each_other_quickly_are_fleeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(packed.time, "monotonic", lambda: now[0])
    packs: Packs[int] = Packs()
    weight = torch.randn(6, 4)
    assert not any(packs.fleeting(weight) for _ in range(20))  # one that changes at every step
    few = packed._FLEETING
    assert [packs.fleeting(alias(weight)) for _ in range(few + 2)] == [False] * few + [True, True]
    now[0] += packed._FORGET_S + 1
    assert [packs.fleeting(alias(weight)) for _ in range(few + 2)] == [False] * (few + 1) + [True]
    assert not packs.fleeting(torch.randn(6, 4))
    packs.clear()
    for _ in range(3 * few):  # each serves a second call: models made one after the other
        one = alias(weight)
        assert not packs.fleeting(one)
        packs.make(one, lambda: 1)
        assert packs.get(one) == 1
    packs.clear()
    assert not packs.fleeting(alias(weight))


@pytest.mark.parametrize("module", [mkl, onednn])
def test_fleeting_weights_take_the_plain_product(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        pytest.skip("no library that packs weights")
    module.forget_packed()
    run: Any = mkl.forward if module is mkl else onednn.forward_packed
    made: list[int] = []
    real = Packs.make

    def watching(self: Any, weight: Tensor, maker: Any) -> Any:
        made.append(1)
        return real(self, weight, maker)

    monkeypatch.setattr(Packs, "make", watching)
    x, weight, bias = torch.randn(5, 16), torch.randn(8, 16), torch.randn(8)
    with torch.no_grad():
        for step in range(packed._FLEETING):
            weight.add_(0.1)
            for activation in ("relu", "gelu"):
                given = alias(weight)
                y, _ = run(x, given, bias, activation, False)
                torch.testing.assert_close(
                    y, reference.forward(x, weight, bias, activation, False)[0]
                )
            if step == packed._FLEETING - 4:
                before = len(made)
        assert before <= packed._FLEETING + 2
        assert len(made) == before
        for _ in range(3):  # one that stays is packed once
            y, _ = run(x, weight, bias, "relu", False)
            want, _ = reference.forward(x, weight, bias, "relu", False)
            torch.testing.assert_close(y, want)
