"""What a model's results can show: NaN beside NaN is no agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fastlinear.core.compare import Verdict
from fastlinear.rewrite.verify.inputs import Call

NOT_FINITE = "not_finite"
REMEDY = "Give the model weights and inputs with which its results are finite numbers."
_GROUPS = {"outputs": "output[", "loss": "loss", "gradients": "grad."}
_MOST = 3  # results that a note names


def why_unproven(results: Mapping[str, Tensor], model: nn.Module, call: Call) -> str | None:
    """Why no rewrite can be compared with these results of the model, or None.

    Its outputs, in train mode its loss and its gradients, have to have a finite number each.
    """
    for what, prefix in _GROUPS.items():
        found = [t for n, t in results.items() if n.startswith(prefix) and _floating(t)]
        total = sum(t.numel() for t in found)
        if total and not any(bool(torch.isfinite(t).any()) for t in found):
            verb = "is" if what == "loss" else "are"
            text = f"the model's {what} {verb} not finite: {total} of {total} numbers"
            return f"cannot be verified: {text}{_source(model, call)}. {REMEDY}"
    return None


def partly_finite(verdicts: Sequence[Verdict]) -> str | None:
    """A note on results of which only some numbers are finite, or None."""
    found = [v for v in verdicts if v.not_finite]
    if not found:
        return None
    named = ", ".join(f"{v.name} ({v.not_finite} of {v.numbers} not)" for v in found[:_MOST])
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f"accuracy compared where results are finite, elsewhere they are the same: {named}{more}"


def _source(model: nn.Module, call: Call) -> str:
    """Where numbers that are not finite go in, if that is to be seen."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if _spoilt(t):
            return f" (nor are those of {name!r})"
    if any(isinstance(leaf, Tensor) and _spoilt(leaf) for leaf in call.leaves()):
        return " (nor are those of the inputs)"
    return ""


def _floating(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _spoilt(t: Tensor) -> bool:
    if t.layout is not torch.strided or t.numel() == 0 or not _floating(t):
        return False
    return not bool(torch.isfinite(t.detach()).all())
