"""One call of an op described by options: shapes, dtype, layout."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES

Family = Annotated[str, typer.Argument(help="The op; linear_act is the only one yet.")]
M = Annotated[int, typer.Option("--m", min=1, help="Tokens: rows of x.")]
K = Annotated[int, typer.Option("--k", min=1, help="In features.")]
N = Annotated[int, typer.Option("--n", min=1, help="Out features.")]
Activation = Annotated[
    str,
    typer.Option(
        help="none, relu, relu2, silu, gelu, gelu_tanh, sigmoid, tanh, quick_gelu, leaky_relu."
    ),
]
Bias = Annotated[bool, typer.Option(help="With a bias of shape (N,).")]
Layout = Annotated[
    str,
    typer.Option(
        "--weight-layout", help="nk: contiguous, as in nn.Linear. kn: transposed, as in Conv1D."
    ),
]
Train = Annotated[bool, typer.Option("--train", help="The backward and its pieces as well.")]


def example_call(
    family: str, m: int, k: int, n: int, dtype: str, bias: bool, layout: str, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Uninitialised tensors of the described call: x (M, K), weight (N, K), bias (N,) or None."""
    from fastlinear.cli.load import usable_device

    if family != "linear_act":
        raise InputError("fastlinear", expected="family in linear_act", received=repr(family))
    if layout not in ("nk", "kn"):
        raise InputError("--weight-layout", expected="nk or kn", received=repr(layout))
    where, kind = usable_device(device), FLOAT_DTYPES[dtype]
    x = torch.empty(m, k, dtype=kind, device=where)
    if layout == "nk":
        weight = torch.empty(n, k, dtype=kind, device=where)
    else:
        weight = torch.empty(k, n, dtype=kind, device=where).t()
    return x, weight, torch.empty(n, dtype=kind, device=where) if bias else None
