"""What a backend does in a call, in kinds of work that have a price on a device.

A backend's ``work`` names kinds and amounts: so many multiplications in one library's product, so
many numbers in a pass over memory, a call. ``dispatch.prices`` holds what a unit of each costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem

_TORCHS = ("torch", "onednn")  # libraries whose results are tensors that PyTorch makes
_FRESH_BYTES = 1 << 25  # from here on the C library asks the system for new memory at every call
_SHALLOW = 4
HOST, CALL = " host", " call"
"""How kinds of work end that have no sizes: what the host pays, and what a kernel's or library's
call costs before it computes anything."""
FRESH, KEPT = "fresh memory", "kept memory"
"""Of large results: given by the system at every call, or left by calls before, for nothing."""
ANY = "any"
"""The dtype under which a GPU's host is priced."""


@dataclass(frozen=True, slots=True)
class Work:
    """Units of one kind of work.

    Attributes:
        kind: its name, for example ``"torch product"``.
        units: how many: multiplications of a product, numbers of a pass, calls.
        sizes: sizes on which the price of a unit depends, by name.
        flags: facts on which it depends besides.
        variants: ways of doing it that are priced by their difference from the kind's own.
        dtype: under which it is priced, where that is not the call's.
    """

    kind: str
    units: float = 1.0
    sizes: Mapping[str, float] | None = None
    flags: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    dtype: str = ""


def dtype_of(p: Problem) -> str:
    """The dtype under which a Problem's work is priced: both of 16 bits are one to a GPU."""
    return "half" if p.device == "cuda" and p.dtype in ("bfloat16", "float16") else p.dtype


def host(name: str, times: float = 1.0) -> Work:
    """What the host pays for a call, a node or a layer, whatever the sizes."""
    return Work(f"{name}{HOST}", times)


def call(name: str, times: float = 1.0, *flags: str) -> Work:
    """What a kernel or a library's call costs before it computes anything."""
    return Work(f"{name}{CALL}", times, None, flags)


def product(
    library: str, m: int, k: int, n: int, dtype: str, layout: str = "nt", *flags: str
) -> tuple[Work, ...]:
    """(m, k) @ (k, n) by a library, and the memory of its result.

    Args:
        layout: how the operands lie: ``"n"`` along the rows, ``"t"`` along the columns.
        flags: more facts.
    """
    sizes = {"m": m, "k": k, "n": n, "kn": k * n, "mk": m * k, "mn": m * n}
    sizes |= {"numbers": m * k + k * n + m * n, "mkn": m * k * n}
    ways = (
        (layout, layout != "nt"),
        ("m=1", m == 1),
        ("n=1", n == 1),
        ("shallow", k <= _SHALLOW),
    )
    variants = tuple(name for name, holds in ways if holds)
    return (
        Work(f"{library} product", m * k * n, sizes, flags, variants),
        *fresh(m * n, dtype, kept=library not in _TORCHS),
    )


def fresh(numbers: float, dtype: str, *, kept: bool = False) -> tuple[Work, ...]:
    """New memory for a result, where that is so large that the system gives it page by page.

    Args:
        kept: whether calls that run without Python have it from memory that results before left.
    """
    size = numbers * FLOAT_DTYPES[dtype].itemsize
    return (Work(KEPT if kept else FRESH, size),) if size >= _FRESH_BYTES else ()


def turned(m: float, n: float, dtype: str) -> tuple[Work, ...]:
    """A copy by rows of m rows of n numbers that lie by columns: PyTorch's pass x ∘ w + b over such
    rows, and what a copy differs from it where that was measured."""
    sizes = {"numbers": m * n, "k": n, "m": m}
    kind, flags = "diagonal_linear addcmul forward pass", ("x=strided",)
    return (Work(kind, m * n, sizes, flags, ("none", "copy")), *fresh(m * n, dtype))


def passed(name: str, m: float, n: float, activation: str, *flags: str) -> tuple[Work, ...]:
    """One elementwise pass over m rows of n numbers, and the call of it."""
    return (
        call(name, 1.0, activation, *flags),
        Work(name, m * n, {"numbers": m * n, "n": n}, flags, (activation,)),
    )


def flags_of(p: Problem, *names: str) -> tuple[str, ...]:
    """The options of these names as flags, where they are not the usual ones."""
    usual = ("no", "dense", "rows", "nk", "none", "apart", "aligned", "32")
    pairs = ((name, p.option(name)) for name in names)
    return tuple(f"{name}={value}" for name, value in pairs if value not in usual)
