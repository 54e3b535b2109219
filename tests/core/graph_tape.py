"""A recorder for machines without a GPU: replays torch's ops at the recorded addresses.

It behaves as CUDA graphs do in what matters to callers: a recording computes nothing, a replay
reads and writes the same memory every time, and what the code did besides torch's ops is fixed.
It exists to test what is built on graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastlinear.core.graphs import Pool


class TapeRecorder:
    """Records torch ops on the CPU.

    Attributes:
        records: how many recordings were made.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.records = 0
        self.recording = False

    def busy(self) -> bool:
        """Whether a recording is under way."""
        return self.recording

    def warm(self, run: Callable[[], object], device: torch.device, times: int) -> None:
        """Run ``times`` times."""
        for _ in range(times):
            run()

    def record(
        self,
        run: Callable[[], Any],
        device: torch.device,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
    ) -> Tape:
        """Run once under watch; results are then made NaN, as a capture computes none."""
        tape = _Mode()
        self.recording = True
        try:
            with tape:
                outputs = run()
        finally:
            self.recording = False
        self.records += 1
        poisoned = [t for _, _, _, made in tape.steps for t, fresh in made if fresh]
        with torch.no_grad():
            for t in poisoned:
                if t.is_floating_point():
                    t.detach().fill_(float("nan"))
        return Tape(tape.steps, outputs)

    def settle(self, device: torch.device) -> None:
        """Nothing runs ahead on a CPU."""


Step = tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[Tensor, bool]]]


class Tape:
    """A list of ops with the very tensors they read and wrote."""

    def __init__(self, steps: list[Step], outputs: Any) -> None:
        self.outputs = outputs
        self._steps = steps

    def replay(self, fill: Callable[..., object] | None = None, *given: Any) -> None:
        """Run the ops again, into the same memory."""
        with torch.no_grad():
            if fill is not None:
                fill(*given)
            for func, args, kwargs, made in self._steps:
                results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for (static, fresh), now in zip(made, results, strict=True):
                    if fresh:
                        static.copy_(now)

    def holders(self, storage: int) -> int:
        """How many tensors of the tape share this memory."""
        steps = [(args, kwargs, [t for t, _ in made]) for _, args, kwargs, made in self._steps]
        held = {id(t): t for t in tree_leaves(steps) if isinstance(t, Tensor)}
        return sum(t.untyped_storage()._cdata == storage for t in held.values())


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((tuple(args), kwargs))
            if isinstance(t, Tensor)
        }
        made = [
            (t.detach(), t.untyped_storage()._cdata not in given)
            for t in tree_leaves(out)
            if isinstance(t, Tensor)
        ]
        args = tuple(_plain(a) for a in args)
        self.steps.append((func, args, {k: _plain(v) for k, v in kwargs.items()}, made))
        return out


def _plain(value: Any) -> Any:
    """Without the autograd graph, which a recording must not keep alive."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_plain(v) for v in value)
    return value
