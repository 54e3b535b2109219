"""``fastlinear explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.call import (
    Activation,
    Bias,
    Call,
    Family,
    FastMatmul,
    FinalActivation,
    K,
    Layers,
    Layout,
    M,
    N,
    Train,
    Width,
    Widths,
)
from fastlinear.cli.console import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", rich_help_panel="Ops")(explain)


def explain(
    family: Family = "linear_act",
    m: M = 64,
    k: K = None,
    n: N = None,
    widths: Widths = None,
    layers: Layers = None,
    width: Width = None,
    dtype: Annotated[opt.Dtype, typer.Option(help="dtype of x and of the weights.")] = (
        opt.Dtype.float32
    ),
    activation: Activation = None,
    final_activation: FinalActivation = None,
    bias: Bias = True,
    layout: Layout = "nk",
    allow_fast_matmul: FastMatmul = False,
    train: Train = False,
    backend: Annotated[
        str | None, typer.Option(help="Force the forward's backend.", show_default=False)
    ] = None,
    device: opt.Place = "cpu",
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say which backend a call takes, why, and why not each other. Measures nothing.

    Examples:

    fastlinear explain linear_act --m 64 --k 1024 --n 1024 --activation gelu --train

    fastlinear explain mlp --m 32 --widths 784,256,10 --activation relu
    """
    call = Call(
        family,
        m=m,
        dtype=dtype.value,
        device=device,
        activation=activation,
        bias=bias,
        layout=layout,
        k=k,
        n=n,
        widths=widths,
        layers=layers,
        width=width,
        final_activation=final_activation,
        allow_fast_matmul=allow_fast_matmul,
    )
    story = call.explain(backend, train)
    if json:
        print_json(story.to_json())
    else:
        typer.echo(str(story))
