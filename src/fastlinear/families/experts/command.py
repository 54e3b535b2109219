"""The options of experts in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

import torch

from fastlinear.families.experts.gate import PLAIN
from fastlinear.families.experts.spec import FRONT
from fastlinear.op.command import FEATURES, Command, Option, Request
from fastlinear.op.spec import Arguments

_EXPERTS, _TOP = 8, 2


def _arguments(call: Request) -> Arguments:
    h, i, experts, top = call["k"], call["hidden"] or call["k"], call["experts"], call["top"]
    slots = torch.arange(call.m * top, device=call.device)
    index = (slots % experts).view(call.m, top)
    weight = call.empty(call.m, top)
    routing = index, weight, call.vector(experts, 2 * i), call.vector(experts, h)
    weights = call.matrix(h, 2 * i, experts), call.matrix(i, h, experts)
    return call.empty(call.m, h), weights, routing, call.activation, "gate_up", PLAIN, "0", False


COMMAND = Command(
    FRONT,
    options=(
        Option("--k", f"Features of a token; {FEATURES} if left out.", FEATURES),
        Option("--hidden", "Hidden features of an expert; as --k if left out."),
        Option("--experts", f"How many experts; {_EXPERTS} if left out.", _EXPERTS),
        Option("--top", f"Experts of a token; {_TOP} if left out.", _TOP),
    ),
    about="the gated MLPs of a mixture of experts",
    remedy="Its sizes are --m tokens, --k and --hidden features, --experts and --top of a token.",
    arguments=_arguments,
    activation="silu",
)
