"""The setting by which a row's result does not depend on the rows beside it."""

from __future__ import annotations

from fastlinear.core import settings
from fastlinear.core.errors import InputError
from fastlinear.dispatch import cache


def batch_invariant(enabled: bool = True) -> None:
    """Have calls give every row the same bits, whatever the other rows are and however many.

    Fast backends share out sums by the number of rows, as PyTorch does: a row's last digits then
    depend on its batch. With this setting, for the rest of the process, calls of fastlinear that
    name no backend take the one named ``"batch_invariant"``; such calls may also name it
    themselves. It holds for results, not for gradients, and for float32, bfloat16 and float16 on
    CPUs and CUDA devices of compute capability 8.0 and later. PyTorch's own layers stay as they
    are. The variable ``FASTLINEAR_BATCH_INVARIANT=1`` says the same from outside.

    Calls that cannot be served so raise UnsupportedError, which says why.

    Args:
        enabled: False leaves choices to predictions again.

    Raises:
        InputError: ``enabled`` is no bool.
    """
    if not isinstance(enabled, bool):
        raise InputError(
            "batch_invariant",
            "enabled to be True or False",
            f"enabled={enabled!r}",
            "Write batch_invariant() or batch_invariant(False).",
        )
    settings.allow_batches(enabled)
    cache.changed()  # plans made before chose by speed
