"""What other layers must be like to become groups of one, and copies of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from fastlinear.core.errors import InputError
from fastlinear.nn.plain_linear import why_not_plain

NAME = "fastlinear.nn.GroupedLinear"
_NO_CONV = "Others mix positions, which no grouped linear layer does."


def check_convolution(conv: Any, kind: type[Any], where: str) -> None:
    """Raise InputError unless ``conv`` is of that class and one over one position: kernel size and
    stride 1, no padding, and nothing else done."""
    reason = why_not_plain(conv, kind, kind.forward)
    if reason is not None and isinstance(conv, kind):
        fail(where, "a convolution and nothing else", reason, "Remove what was added.")
    ones = (1,) * (kind is nn.Conv2d) + (1,)
    if not isinstance(conv, kind) or (conv.kernel_size, conv.stride) != (ones, ones):
        expected = f"an nn.{kind.__name__} of kernel size and stride 1"
        fail(where, expected, repr(conv), _NO_CONV)
    if conv.padding not in (tuple(0 for _ in ones), "valid", "same"):
        fail(where, "a convolution without padding", repr(conv), _NO_CONV)


def check_own(layers: Sequence[nn.Linear], where: str) -> None:
    """Raise InputError where a parameter is held by two layers, or is trained in some layers only:
    one stacked parameter could be neither."""
    for name in ("weight", "bias"):
        held = [getattr(layer, name) for layer in layers]
        if held[0] is None:
            continue
        first: dict[int, int] = {}
        for i, t in enumerate(held):
            known = first.setdefault(id(t), i)
            if known != i:
                fail(
                    where,
                    "layers with parameters of their own",
                    f"layers {known} and {i}, which share their {name}",
                    "A copy would train apart: untie them first, for example by copy.deepcopy.",
                )
        frozen = [i for i, t in enumerate(held) if not t.requires_grad]
        if 0 < len(frozen) < len(held):
            fail(
                where,
                f"the {name} of all layers to be trained, or of none",
                f"a frozen {name} of layer {frozen[0]} among trained ones",
                "Group frozen and trained layers apart, or call requires_grad_ on all.",
            )


def parameter(
    values: Any, index: int | None = None, *, shape: tuple[int, ...] | None = None
) -> nn.Parameter:
    """A copy of a tensor, of one row of it, of a stack of tensors or of another shape, as trainable
    as what it is made of."""
    if isinstance(values, list):
        grad, data = values[0].requires_grad, torch.stack([v.detach() for v in values])
    else:
        grad, data = values.requires_grad, values.detach()
    if index is not None:
        data = data[index]
    data = data.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(data if shape is None else data.view(shape), requires_grad=grad)


def fail(where: str, expected: str, received: str, remedy: str) -> NoReturn:
    """Raise InputError of the layer, or of one of its methods."""
    raise InputError(f"{NAME}{where}", expected, received, remedy)
