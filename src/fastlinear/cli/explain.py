"""``fastlinear explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.call import Activation, Bias, Call, Family, Layout, M, Train
from fastlinear.cli.console import print_json, say
from fastlinear.cli.families import DEFAULT, FamilyCommand, given_of
from fastlinear.cli.load import default_device
from fastlinear.dispatch.backend import check_backend


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", cls=FamilyCommand, rich_help_panel="Ops")(explain)


def explain(
    ctx: typer.Context,
    family: Family = DEFAULT,
    m: M = 64,
    dtype: Annotated[opt.Dtype, typer.Option(help="dtype of x and of the weights.")] = (
        opt.Dtype.float32
    ),
    activation: Activation = None,
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
    where = device or default_device()
    call = Call(family, m, dtype.value, where, activation, bias, layout, given_of(ctx))
    check_backend(backend, call.family, "--backend")
    story = call.explain(backend, train)
    if json:
        print_json(story.to_json())
    else:
        say(str(story))
