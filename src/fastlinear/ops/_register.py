"""The single door to torch.library: every op fastlinear registers goes through here.

Registered ops serve ``torch.compile`` and export. Eager calls do not pass here, because a
registered op costs microseconds a call that small layers cannot spare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fastlinear", "DEF")
_KEPT: list[Any] = []


def register_op(
    name: str,
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register ``torch.ops.fastlinear.<name>`` for CPU and CUDA.

    Args:
        name: op name.
        schema: arguments and returns, for example ``"(Tensor x) -> Tensor"``.
        implementation: the eager implementation for both devices.
        fake: shapes, dtypes and strides of the results, without computing.
        backward, setup_context: the autograd formula, as ``torch.library.register_autograd`` takes.
    """
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fastlinear::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"fastlinear::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
