"""A model family of the suite, and how it is built."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any]
"""A model in float32 on the CPU and its inputs, in a form that ``optimize_`` takes."""
ROWS, TOKENS, VOCABULARY = 2, 64, 1000


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: as the field names it, in lower case with hyphens.
        kind: the group it is reported in.
        build: makes the model and its inputs from torch's global generator.
        needs: the package beside torch that it is built from, or the empty string.
    """

    name: str
    kind: str
    build: Callable[[], Built]
    needs: str = ""

    def why_not(self) -> str | None:
        """Why it cannot be built here, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        return None

    def built(self, seed: int) -> Built:
        """The model and its inputs, the same ones for the same seed."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()


def of_torch(kind: str, **builders: Callable[[], Built]) -> tuple[Family, ...]:
    """Families of one kind written in torch alone: name, with underscores, → builder."""
    return tuple(Family(n.replace("_", "-"), kind, build) for n, build in builders.items())


def of_transformers(
    kind: str,
    name: str,
    prefix: str,
    inputs: Callable[[], Any] | None = None,
    model: str = "",
    **config: Any,
) -> Family:
    """A family of the package transformers, made by its configuration; nothing is downloaded.

    Args:
        kind: the group it is reported in.
        name: of the family.
        prefix: of its classes: ``prefix + "Config"`` and ``prefix + "Model"``.
        inputs: makes the inputs; ``tokens`` if not given.
        model: the name of the model's class, where it is another one.
        config: what the configuration is given.
    """

    def build() -> Built:
        import transformers

        made = getattr(transformers, f"{prefix}Config")(**config)
        return getattr(transformers, model or f"{prefix}Model")(made), (inputs or tokens)()

    return Family(name, kind, build, "transformers")


def tokens() -> dict[str, torch.Tensor]:
    """Token ids, (ROWS, TOKENS)."""
    return {"input_ids": torch.randint(3, VOCABULARY, (ROWS, TOKENS))}


def pixels(size: int = 64) -> dict[str, torch.Tensor]:
    """Images, (ROWS, 3, size, size)."""
    return {"pixel_values": torch.randn(ROWS, 3, size, size)}
