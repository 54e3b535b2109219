"""The list of activations, and what is derived from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import ACTIVATIONS, CPP_MACRO, NAMES, activation
from fastlinear.fastpath import aten_steps
from fastlinear.nn.mlp_sequential import module_of

ROOT = Path(__file__).parents[2]


def test_the_readme_lists_every_name() -> None:
    line = re.search(r"^Activations: ([^.]*)\.", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert line is not None
    names = re.sub(r" \(\w+\)", "", line[1]).replace("\n", " ")
    assert names.split(", ") == list(NAMES)


def test_codes_stay() -> None:
    """Stored plans and compiled libraries count on them: new names come last."""
    assert NAMES[:5] == ("none", "relu", "relu2", "silu", "gelu")
    assert NAMES[5:10] == ("gelu_tanh", "sigmoid", "tanh", "quick_gelu", "leaky_relu")
    assert CPP_MACRO.startswith("FASTLINEAR_ACTIVATIONS(DO)=DO(None,0) DO(Relu,0) DO(Relu2,1)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in NAMES if activation(n).in_place])
def test_in_place_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    act, pre = activation(name), (torch.randn(40, 33) * 4).to(dtype)
    expected, over = act.value(pre), pre.clone()
    assert act.in_place is not None
    result = act.in_place(over)
    assert result.data_ptr() == over.data_ptr()
    assert torch.equal(over, expected)


@pytest.mark.parametrize("name", [n for n in NAMES if activation(n).module])
def test_the_module_computes_it(name: str) -> None:
    pre = torch.randn(100)
    assert torch.equal(module_of(name)(pre), activation(name).value(pre))


def replayed(calls: tuple[aten_steps.Call, ...], result: int, *given: Tensor) -> Tensor:
    tensors = list(given)
    for call in calls:
        arguments = [
            tensors[a.number] if isinstance(a, aten_steps.Number) else a for a in call.arguments
        ]
        names = [argument.name for argument in call.op._schema.arguments]
        own = dict(zip(names, arguments, strict=True))
        tensors.append(call.op(own.pop(names[0]), **own))
    return tensors[result]


@pytest.mark.parametrize("name", NAMES)
def test_steps_replay_the_composition(name: str) -> None:
    act, pre, dy = ACTIVATIONS[name], torch.randn(50), torch.randn(50)
    assert torch.equal(replayed(*aten_steps.composed(act.value, 1), pre), act.value(pre))
    saved = act.value(pre) if act.saved == "output" else pre
    steps = aten_steps.composed(act.backward, 2)
    assert torch.equal(replayed(*steps, dy, saved), act.backward(dy, saved))


def test_one_op_with_other_constants_is_another_function() -> None:
    ops = torch.ops.aten
    x = torch.randn(3)
    assert aten_steps.name_of(ops.gelu.default, (x,), {"approximate": "tanh"}) == "gelu_tanh"
    assert aten_steps.name_of(ops.gelu_.default, (x,), {}) == "gelu"
    assert aten_steps.name_of(ops.leaky_relu.default, (x, 0.01), {}) == "leaky_relu"
    assert aten_steps.name_of(ops.leaky_relu.default, (x, 0.2), {}) is None
    assert aten_steps.name_of(ops.mul.Tensor, (x, x), {}) is None
    assert aten_steps.name_of(ops.view.default, (x, [3]), {}) is None


def test_what_autograd_moves_and_keeps() -> None:
    assert aten_steps.moved("none") == (0, 0)
    assert aten_steps.moved("gelu") == (2, 3)
    assert aten_steps.moved("relu2") == (4, 10)
    assert aten_steps.moved("quick_gelu") == (7, 14)
    assert aten_steps.kept("leaky_relu") == {"pre"}
    assert aten_steps.kept("tanh") == {"output"}
    assert aten_steps.kept("relu2") == {"its relu"}
    assert aten_steps.kept("quick_gelu") == {"pre", "its sigmoid"}


def test_composing_ignores_what_is_around_it() -> None:
    """A tape may be made under autocast, in inference mode or under a user's own mode."""
    aten_steps.composed.cache_clear()
    plain = aten_steps.composed(F.silu, 1)
    aten_steps.composed.cache_clear()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert aten_steps.composed(F.silu, 1) == plain
