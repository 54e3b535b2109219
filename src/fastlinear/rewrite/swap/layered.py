"""Calls that compute several layers, of which verification follows each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Layered(NamedTuple):
    """What such a call does, by its arguments.

    Attributes:
        activations: behind each layer.
        results: what every layer gives, of the last one what the call does.
    """

    activations: Callable[..., tuple[str, ...]]
    results: Callable[..., list[tuple[Tensor, ...]]]


LAYERED: dict[Callable[..., Any], Layered] = {}
"""By function: a rule that makes such a call says here what its layers are."""
