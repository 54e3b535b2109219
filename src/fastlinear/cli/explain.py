"""``fastlinear explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.call import Activation, Bias, Family, K, Layout, M, N, Train, example_call
from fastlinear.cli.console import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", rich_help_panel="Ops")(explain)


def explain(
    family: Family = "linear_act",
    m: M = 64,
    k: K = 1024,
    n: N = 1024,
    dtype: Annotated[opt.Dtype, typer.Option(help="dtype of x and of the weight.")] = (
        opt.Dtype.float32
    ),
    activation: Activation = "none",
    bias: Bias = True,
    layout: Layout = "nk",
    train: Train = False,
    backend: Annotated[
        str | None, typer.Option(help="Force the forward's backend.", show_default=False)
    ] = None,
    device: opt.Device = "cpu",
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say which backend a call takes, why, and why not each other. Measures nothing.

    Example: fastlinear explain linear_act --m 64 --k 1024 --n 1024 --activation gelu --train
    """
    from fastlinear.ops.linear_act import explain as explain_call

    x, weight, b = example_call(family, m, k, n, dtype.value, bias, layout, device)
    story = explain_call(x, weight, b, activation=activation, backend=backend, needs_grad=train)
    if json:
        print_json(story.to_json())
    else:
        typer.echo(str(story))
