"""What is told of the memory of a training call is what autograd really keeps."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.dispatch.explain import Kept
from fastlinear.families.gated import explain
from fastlinear.families.gated.saved_memory import OWN
from fastlinear.families.gated.stacking import ORDERS
from tests.families.compiled_nodes import needs_nodes
from tests.families.gated.gated_layers import stored
from tests.families.gated.gated_ways import draw

M, K, H, N = 7, 16, 24, 40
ALL = (True,) * 7
WAYS: dict[str, dict[str, Any]] = {
    OWN: {"backend": "eager"},
    "recompute=0": {"recompute": 0},
    "recompute=1": {"recompute": 1},
}


def both(
    given: list[Tensor | None], order: str, activation: str, down: bool, way: str
) -> tuple[Kept, int]:
    """What is told of a call, and the bytes that it really keeps besides the parameters."""
    options = {"activation": activation, **WAYS[way]}
    options["stacked"] = None if order == "apart" else order
    x, wg, wu, _, bg, bu, _ = given
    assert x is not None
    assert wg is not None
    if down:
        _, found = stored(lambda: fl.gated_mlp(*given, **options), given[1:])  # type: ignore[arg-type]
    else:
        _, found = stored(lambda: fl.gated_linear(x, wg, wu, bg, bu, **options), given[1:])
    (taken, *others) = explain(*given, **options).kept  # type: ignore[arg-type]
    assert [taken.taken, *(o.taken for o in others)] == [True, *[False] * len(others)]
    assert {taken.way, *(o.way for o in others)} == {way, "recompute=0", "recompute=1"}
    return taken, found


@pytest.mark.parametrize("bias", ["no", "some", "yes"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_any_set_of_gradients(way: str, order: str, bias: str) -> None:
    for needs in itertools.product((False, True), repeat=7):
        given = draw((M, K), order, bias, needs)
        if not any(t is not None and t.requires_grad for t in given):
            continue
        told, found = both(given, order, "silu", True, way)
        assert told.way == way
        assert told.bytes == found, needs


@needs_nodes[0]
@needs_nodes[1]
@pytest.mark.parametrize("order", ["apart", "gate_up"])
@pytest.mark.parametrize("way", ["recompute=0", "recompute=1"])
def test_any_set_of_gradients_by_the_node(way: str, order: str) -> None:
    for needs in itertools.product((False, True), repeat=7):
        given = draw((M, K), order, "yes", needs)
        if not any(t is not None and t.requires_grad for t in given):
            continue
        for _ in range(2):
            told, found = both(given, order, "silu", True, way)
            assert told.bytes == found, needs
    options = {**WAYS[way], "stacked": None if order == "apart" else order}
    y = fl.gated_mlp(*draw((M, K), order, "yes"), **options)  # type: ignore[arg-type]
    assert type(y.grad_fn).__name__ == "CppFunction"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_any_activation(way: str, activation: str) -> None:
    for order, down in itertools.product(ORDERS, (True, False)):
        for frozen in (None, 0, 1, 2, 3):
            needs = [i != frozen for i in range(7)]
            given = draw((2, M, K), order, "no", needs, down=down)
            told, found = both(given, order, activation, down, way)
            assert told.bytes == found, (order, down, frozen)


@pytest.mark.parametrize("way", WAYS)
def test_half_the_bytes_in_half_the_width(way: str) -> None:
    given = draw((M, K), "apart", "yes", dtype=torch.bfloat16)
    told, found = both(given, "apart", "gelu", True, way)
    assert told.bytes == found
    assert told.bytes == M * {OWN: K + 4 * H, "recompute=0": K + 2 * H, "recompute=1": K}[way] * 2


def test_autocast() -> None:
    given = draw((M, K), "apart", "yes")
    with torch.autocast("cpu", torch.bfloat16):
        told = explain(*given, recompute=0)  # type: ignore[arg-type]
    assert told.kept[0].bytes == 2 * M * (K + 2 * H)


def test_the_text_and_the_json_of_it() -> None:
    given = draw((1024, K), "apart", "no", (False,) * 7)
    x, gate, up, down = given[:4]
    assert x is not None
    assert gate is not None

    def told(**how: Any) -> Any:
        return fl.explain(x, gate, up_weight=up, down_weight=down, **how)

    assert not told().kept
    assert "kept" not in str(told())
    shown = told(needs_grad=True, recompute=1)
    first = f"-> recompute=1: {4 * 1024 * K} bytes ({4 * K / 1024} MiB), x"
    assert first in str(shown)
    assert f"   recompute=0: {4 * 1024 * (K + 2 * H)} bytes (0.25 MiB), x, both pre" in str(shown)
    backward = json.loads(json.dumps(shown.to_json()))[1]
    assert backward["problem"]["piece"] == "backward"
    assert [k["way"] for k in backward["kept"]] == ["recompute=1", "recompute=0"]
    assert backward["kept"][0]["bytes"] == 4 * 1024 * K
    down.requires_grad_()
    assert [k.what for k in told(recompute=0).kept] == ["both pre-activations", "x"]
    assert told(backend="eager").kept[0].what == "what the gate lets through"
