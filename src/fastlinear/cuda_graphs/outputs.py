"""Outputs that live in a graph's own memory, and refuse to be read once it was written again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError


class Generation:
    """How many times a graph has written its outputs."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class ReusedOutput(Tensor):
    """A tensor in a graph's memory; any use after the graph's next replay raises.

    Views of it are guarded as well; what is computed from it is a plain tensor.
    """

    _generation: Generation
    _made_at: int

    @staticmethod
    def guard(static: Tensor, generation: Generation) -> ReusedOutput:
        """The graph's buffer as it is now."""
        out = static.as_subclass(ReusedOutput)
        out._generation, out._made_at = generation, generation.count
        return out

    def current(self) -> Tensor:
        """The plain tensor. Raises UnsupportedError when the graph has been replayed since."""
        if self._made_at != self._generation.count:
            raise UnsupportedError(
                "graphed",
                "an output of reuse_outputs=True to be read before the next call",
                "an output whose memory a later call has overwritten",
                "Clone what must outlive the next call, or leave reuse_outputs out.",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check that no argument is stale, then run on plain tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            owners = list(_guarded((tuple(args), dict(kwargs))))
            for owner in owners:
                owner.current()
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not isinstance(out, ReusedOutput):
                storage = out.untyped_storage()._cdata
                for owner in owners:
                    if storage == owner.untyped_storage()._cdata:
                        return ReusedOutput.guard(out, owner._generation)
        return out


def _guarded(value: Any) -> Iterator[ReusedOutput]:
    if isinstance(value, ReusedOutput):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _guarded(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _guarded(v)
