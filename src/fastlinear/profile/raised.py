"""What a model's own code raises in the middle of the work, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fastlinear.core.errors import FastlinearError, InputError

PASSED_ON = (FastlinearError, torch.OutOfMemoryError)
"""What says by itself what is the matter."""


def raised(function: str, model: nn.Module, doing: str, error: Exception) -> InputError:
    """The error for what a run of the model raised after another had passed; ``doing``: what the
    run was for. To be raised from ``error``."""
    return InputError(
        function,
        f"{type(model).__name__} to run on the same inputs as often as it is called",
        f"{type(error).__name__}: {' '.join(str(error).split())}, {doing}",
        "An earlier run passed, and the model has been put back as it was: look for what it "
        "keeps from run to run. The exception this one was raised from shows where.",
    )


@contextmanager
def told(function: str, model: nn.Module, doing: str) -> Iterator[None]:
    """Inside it the model's own code runs, and what it raises is ``raised`` from."""
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        raise raised(function, model, doing, error) from error
