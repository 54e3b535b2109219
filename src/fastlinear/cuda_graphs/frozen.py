"""The plan of the last call, found again without a key when the next call is like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.precision import float32_precision
from fastlinear.core.settings import batch_invariant
from fastlinear.cuda_graphs.plan import Plan
from fastlinear.cuda_graphs.watch import Watch, layout_guard

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_MAX_GUARDS = 64  # a guard takes longer to make than it saves in one call


class Frozen:
    """Remembers one plan, once two calls in a row took it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: Plan | None = None
        self._plan: Plan | None = None
        self._made = 0

    def drop(self) -> None:
        """Forget the plan."""
        self._seen = self._plan = None

    def plan(self, args: tuple[Any, ...]) -> Plan | None:
        """The plan, if a call with these arguments has it, and its recording is free for it."""
        plan, watch = self._plan, self._watch
        if (
            plan is not None
            and len(args) == self._many
            and watch.token == self._token
            and self._guard(*args, *watch.tensors)
            and watch.in_place()
            and self._modes() == self._were
            and not plan.entry.busy()
        ):
            return plan
        return None

    def took(self, plan: Plan, tensors: Sequence[Tensor] | None) -> None:
        """A call took this plan: its arguments, or None where they were not only tensors."""
        if plan is not self._seen or tensors is None:
            self._seen, self._plan = plan, None
        elif self._made < _MAX_GUARDS and not _any_autocast():
            self._made += 1
            self._many, self._token = len(tensors), self._watch.token
            self._guard = layout_guard([*tensors, *self._watch.tensors])
            self._were = self._modes()
            self._plan = plan

    def _modes(self) -> tuple[Any, ...]:
        return (
            *(_grad_enabled(), _any_autocast(), _deterministic()),
            *(float32_precision(), batch_invariant()),
        )
