"""The options of ragged_linear in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

import torch

from fastlinear.families.grouped.ragged.spec import FRONT
from fastlinear.op.command import GROUP_OPTIONS, Command, Request
from fastlinear.op.spec import Arguments


def _arguments(call: Request) -> Arguments:
    groups, k = call["groups"], call["k"]
    n = call["n"] or k
    sizes = torch.full((groups,), call.m // groups, device=call.device)
    more = sizes, call.vector(groups, n)
    return call.empty(call.m, k), call.matrix(k, n, groups), more, call.activation


COMMAND = Command(
    FRONT,
    options=GROUP_OPTIONS,
    about="the same, of rows that the groups share",
    remedy="Its sizes are --m rows of all groups, --groups, and --k and --n of each group.",
    arguments=_arguments,
)
