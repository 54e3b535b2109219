"""Interrupts at chosen instants, and what a process is to be like after them."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastlinear.core import interrupts
from fastlinear.dispatch import cache
from fastlinear.fastpath import build

SIGNAL = signal.SIGUSR1
# where state is changed, ours and torch's
_FILES = (
    *("/fastlinear/core/", "/fastlinear/dispatch/", "/fastlinear/profile/", "/contextlib.py"),
    *("/rewrite/swap/", "/rewrite/remember.py", "/rewrite/verify/", "/rewrite/optimize.py"),
    *("/torch/autograd/", "/torch/overrides.py", "/torch/utils/_python_dispatch.py"),
    *("/torch/fx/_symbolic_trace.py", "/torch/amp/", "/torch/random.py", "/warnings.py"),
    *("/torch/nn/modules/module.py", "/torch/utils/hooks.py", "/torch/utils/_contextlib.py"),
)


class Stopped(BaseException):
    """What the signal's handler raises."""


def stop(*_: object) -> None:
    raise Stopped


class Instants:
    """Counts the steps of Python where state is changed, and sends a signal at one of them.

    Attributes:
        seen: how many there were.
        where: the step at which it was sent.
    """

    def __init__(self, at: int | None = None, opcodes: bool = False) -> None:
        self.seen = 0
        self.where = ""
        self._at = at
        self._opcodes = opcodes
        self._followed: dict[Any, bool] = {}

    def run(self, function: Callable[[], object]) -> bool:
        """Whether the function ended by the signal. Handlers and tracing are put back."""
        before, tracer = signal.signal(SIGNAL, stop), sys.gettrace()
        sys.settrace(self._enter)
        try:
            function()
        except Stopped:
            return True
        finally:
            sys.settrace(tracer)
            signal.signal(SIGNAL, before)
        return False

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        followed = self._followed.get(code)
        if followed is None:
            name = code.co_filename.replace(os.sep, "/")
            followed = self._followed[code] = any(part in name for part in _FILES)
        if not followed:
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._step(frame, event, None)

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        counts = event in ("call", "opcode" if self._opcodes else "line")
        if counts and signal.getsignal(SIGNAL) == interrupts._handle:
            self.seen += 1
            if self.seen == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(SIGNAL)
        return self._step


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """The state of the process and the model, to be compared with ``==``."""
    hooks = {k: list(v) for k, v in vars(module_hooks).items() if "_hooks" in k}
    parts = [
        {k: list(v.items()) if isinstance(v, dict) else id(v) for k, v in vars(m).items()}
        for m in model.modules()
    ]
    numpy: Any = np.random.get_state()
    return {
        "gc": gc.isenabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "random": (torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "modes": (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": dict(os.environ),
        "fx": (nn.Module.__call__, nn.Module.__getattr__, torch.fx.Tracer.trace),
        "profiler": torch.autograd._profiler_enabled(),
        "hooks": hooks,
        "modules": parts,
        "parameters": [(p.tolist(), id(p.grad), p.requires_grad) for p in model.parameters()],
        "cache": (cache._on_disk, id(cache._loaded)),
        "patience": build._until.get(),
        "own": (dict(interrupts._replaced), list(interrupts._open), list(interrupts._waiting)),
        "signal": signal.getsignal(SIGNAL),
    }
