"""Whether a plan was made for this model and this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from fastlinear.core.environment import environment
from fastlinear.core.errors import PlanError
from fastlinear.dispatch.backend import families, family
from fastlinear.rewrite.plan import Plan, model_facts

_APPLIED = ("0.1.0", "0.2.0")  # versions of fastlinear whose plans this one applies
_MOVE = "move the model to such a device"


def check_fits(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Raise PlanError unless the plan was made for such a model on such a machine."""
    facts = model_facts(model)
    if plan.model["class"] != facts["class"]:
        _refuse(
            f"a model of class {plan.model['class']}, which the plan was made for",
            f"one of class {facts['class']}",
            "Pass that model, or make a plan for this one with optimize_.",
        )
    held = {*dict(model.named_modules()), *dict(model.named_parameters())}
    for rewrite in plan.rewrites:
        for name in (rewrite.fqn, rewrite.activation_fqn, rewrite.parent_fqn):
            if name is not None and name not in held:
                _refuse(
                    f"a model with a module or parameter named {name!r}",
                    f"a {facts['class']} without it",
                    "Make a new plan with optimize_.",
                )
    if plan.model["fingerprint"] != facts["fingerprint"]:
        _refuse(
            f"a {facts['class']} of {plan.model['parameters']} parameters with the names, shapes "
            f"and dtypes the plan was made for (fingerprint {plan.model['fingerprint']})",
            f"one of {facts['parameters']} parameters (fingerprint {facts['fingerprint']})",
            "Build it with the sizes and dtype it had, or make a new plan with optimize_.",
        )
    _check_known(plan)
    here = environment(device)
    version = plan.fastlinear if plan.fastlinear in _APPLIED else here["fastlinear"]
    facts_of: tuple[tuple[str, Any, Any, str], ...] = (
        ("device", plan.environment["device"]["kind"], here["device"]["kind"], _MOVE),
        ("device", plan.environment["device"]["slug"], here["device"]["slug"], _MOVE),
        ("torch", plan.environment["torch"], here["torch"], "install that version"),
        ("fastlinear", plan.fastlinear, version, "install that version"),
        (
            "float32 matmul precision",
            _precision(plan.environment),
            _precision(here),
            "call torch.set_float32_matmul_precision({!r}) first",
        ),
        (
            "threads",
            _threads(plan.environment),
            _threads(here),
            "call torch.set_num_threads({!r}) first",
        ),
    )
    for what, then, now, undo in facts_of:
        if then is not None and then != now:
            _refuse(
                f"{what} {then}, as where the plan was made",
                f"{what} {now}",
                "Its choices and timings do not carry over: make a new plan with optimize_ here, "
                f"or {undo.format(then)}.",
            )


def _check_known(plan: Plan) -> None:
    """Raise PlanError for forced backends that this version does not have."""
    for rewrite in plan.linears:
        names = ["together"]
        if rewrite.family in families():
            known = family(rewrite.family).candidates("forward", on_request=True)
            names = sorted({b.name for b in known})
        if rewrite.backend is not None and rewrite.backend not in names:
            _refuse(
                f"a plan that forces a backend of {rewrite.rule} in {', '.join(names)}",
                repr(rewrite.backend),
                "Make the plan again with optimize_ of this version.",
            )


def _precision(environment: Mapping[str, Any]) -> str | None:
    """What float32 products may round to, None where a plan does not say."""
    found: str | None = environment.get("flags", {}).get("float32_matmul_precision")
    return found


def _threads(environment: Mapping[str, Any]) -> int | None:
    """Of a CPU, None elsewhere."""
    on_cpu = environment["device"]["kind"] == "cpu"
    return environment.get("threads") if on_cpu else None


def _refuse(expected: str, received: str, remedy: str) -> NoReturn:
    raise PlanError("apply_", expected, received, remedy)
