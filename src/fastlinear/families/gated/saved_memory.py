"""What a training call of gated_mlp keeps between forward and backward, besides the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.explain import Kept
from fastlinear.families.gated.problem import STEP
from fastlinear.families.gated.stacking import Biases, Needs, Weights
from fastlinear.fastpath import aten_steps

READERS = 0b0111111
"""The gradients, as bits, that read what is kept: all but the down bias's, which reads dy alone."""
_DOWN_WEIGHT = 0b0001000
"""It reads the pre-activations; no more than they leads to its second derivatives."""
OWN = "PyTorch's own autograd"
_LEVELS = {"recompute=0": True, "recompute=1": False}  # whether pre-activations are kept
_GATE, _UP, _BOTH = "the gate's pre-activation", "the up projection's", "both pre-activations"


def reads_kept(needs: Sequence[bool]) -> bool:
    """Whether any of the seven gradients that are wanted reads what is kept."""
    return any(needs[:6])


def readers_of_x(save_pre: bool) -> int:
    """The gradients, as bits, for which x is kept, where the pre-activations are or are not."""
    return READERS & ~_DOWN_WEIGHT if save_pre else READERS


def keeps_x(needs: Sequence[bool], save_pre: bool) -> bool:
    """Whether x is kept for the gradients that are wanted."""
    return any(need and readers_of_x(save_pre) >> i & 1 for i, need in enumerate(needs))


def needs_of(x: Tensor, weights: Weights, biases: Biases) -> Needs:
    """Which gradients the tensors of a call ask for; where none do, those of all of them."""
    given = (x, *weights, *biases)
    asked = tuple(t is not None and t.requires_grad for t in given)
    return asked if any(asked) else tuple(t is not None for t in given)  # type: ignore[return-value]


def way_of(backends: Mapping[str, str], recompute: int | None) -> str:
    """The way a training call takes, as ``kept`` names it; ``backends``: piece → its backend."""
    names = {name for piece, name in backends.items() if piece != STEP}
    if recompute is None and names == {"eager"}:
        return OWN
    return f"recompute={int(recompute == 1)}"


def kept(p: Problem, needs: Needs, way: str) -> dict[str, int]:
    """What a way of training keeps between forward and backward, in bytes.

    Args:
        p: the call's Problem, of any piece.
        needs: which gradients are wanted.
        way: ``"recompute=0"``, ``"recompute=1"`` or ``OWN``.

    Returns:
        Name → bytes, tensors of the call itself left out but for x, which others may hold as well.
    """
    per_number = p.dim("M") * FLOAT_DTYPES[p.dtype].itemsize
    x, hidden = per_number * p.dim("K"), per_number * p.dim("H")
    if way == OWN:
        return _by_autograd(p, needs, x, hidden)
    save_pre = _LEVELS[way]
    found = {"x": x} if keeps_x(needs, save_pre) else {}
    return {**found, _BOTH: 2 * hidden} if save_pre and reads_kept(needs) else found


def account(p: Problem, needs: Needs, way: str) -> tuple[Kept, ...]:
    """The way that a call takes, then the levels of ``recompute`` that it does not."""
    ways = (way, *(level for level in _LEVELS if level != way))
    return tuple(_told(w, kept(p, needs, w), w == way) for w in ways)


def _told(way: str, parts: Mapping[str, int], taken: bool) -> Kept:
    return Kept(way, ", ".join(parts) or "nothing", sum(parts.values()), taken)


def _by_autograd(p: Problem, needs: Needs, x: int, hidden: int) -> dict[str, int]:
    """By PyTorch's operations as ``reference.gated_mlp`` writes them: each saves what the gradients
    read that are wanted of it. A half of a stack is a view, which keeps the whole."""
    dx, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = needs
    stacked = p.option("order") != "apart"
    gate = dx or gate_weight or gate_bias
    up = gate if stacked else dx or up_weight or up_bias
    name = p.option("activation")
    value = _GATE if name == "none" else "the activation"
    found: set[str] = set()
    if gate:
        found |= _saved_by(name, value) | {_UP}
    if up:
        found.add(value)
    if stacked and found & {_GATE, _UP}:
        found = found - {_GATE, _UP} | {_BOTH}
    if down_weight:
        found.add("what the gate lets through")
    sizes = {"x": x} if gate_weight or up_weight else {}
    return sizes | {part: 2 * hidden if part == _BOTH else hidden for part in sorted(found)}


def _saved_by(name: str, value: str) -> set[str]:
    """What the activation itself saves of the gate."""
    return {{"pre": _GATE, "output": value}.get(part, part) for part in aten_steps.kept(name)}
