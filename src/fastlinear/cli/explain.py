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
    FinalActivation,
    Groups,
    Hidden,
    K,
    Layers,
    Layout,
    Length,
    M,
    N,
    Stacked,
    Train,
    Width,
    Widths,
    XLayout,
)
from fastlinear.cli.console import print_json, say
from fastlinear.cli.load import default_device
from fastlinear.dispatch.backend import check_backend


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
    hidden: Hidden = None,
    stacked: Stacked = None,
    groups: Groups = None,
    x_layout: XLayout = None,
    length: Length = None,
    dtype: Annotated[opt.Dtype, typer.Option(help="dtype of x and of the weights.")] = (
        opt.Dtype.float32
    ),
    activation: Activation = None,
    final_activation: FinalActivation = None,
    bias: Bias = True,
    layout: Layout = "nk",
    train: Train = False,
    backend: Annotated[
        str | None, typer.Option(help="Force the forward's backend.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:INDEX; if left out the GPU that torch sees, else the CPU.",
            show_default=False,
        ),
    ] = None,
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say which backend a call takes, why, and why not each other. Measures nothing.

    Examples:

    fastlinear explain linear_act --m 64 --k 1024 --n 1024 --activation gelu --train

    fastlinear explain mlp --m 32 --widths 784,256,10 --activation relu

    fastlinear explain diagonal-linear --width 160 --batch 32768

    fastlinear explain gated_mlp --m 64 --k 1024 --hidden 4096 --stacked gate_up --no-bias

    fastlinear explain grouped_linear --m 4096 --groups 100 --k 100 --x-layout "... g k"
    """
    call = Call(
        family,
        m=m,
        dtype=dtype.value,
        device=device or default_device(),
        activation=activation,
        bias=bias,
        layout=layout,
        k=k,
        n=n,
        widths=widths,
        layers=layers,
        width=width,
        final_activation=final_activation,
        hidden=hidden,
        stacked=stacked,
        groups=groups,
        x_layout=x_layout,
        length=length,
    )
    check_backend(backend, call.family, "--backend")
    story = call.explain(backend, train)
    if json:
        print_json(story.to_json())
    else:
        say(str(story))
