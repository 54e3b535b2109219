"""Experiment ``linear-modules``: what one call of a layer as a module costs, in layers so small
that the call is nearly all of it."""

from __future__ import annotations

from benchmarks.harness.case import Case

_ROWS = (1, 8)
_WIDTHS = (8, 16, 32, 64)


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type."""
    found = [
        _case(m, n, activation, direction, device)
        for direction in ("forward", "forward+backward")
        for activation in ("relu", "gelu", "none")
        for m in _ROWS
        for n in _WIDTHS
    ]
    return [c for c in found if c.dim("M") == 1 and c.dim("N") == _WIDTHS[0]] if quick else found


def _case(m: int, n: int, activation: str, direction: str, device: str) -> Case:
    return Case(
        experiment="linear-modules",
        family="linear_modules",
        dims=(("M", m), ("K", n), ("N", n), ("L", 1)),
        dtype="float32",
        device=device,
        direction=direction,
        metrics=("wall",),
        options=(("activation", activation), ("bias", "yes"), ("caches", "warm")),
    )
