"""The check of a backend's name where it is given, before any call."""

from __future__ import annotations

from fastlinear.core.errors import InputError
from fastlinear.dispatch.backend import family


def check_backend(backend: str | None, family_name: str, function: str) -> None:
    """Raise InputError unless it is None or the name of a forward's backend of the family."""
    if backend is None:
        return
    names = sorted({b.name for b in family(family_name).candidates("forward")})
    if backend not in names:
        raise InputError(
            function,
            expected=f"a backend of {family_name} in {', '.join(names)}",
            received=repr(backend),
            remedy="Leave it out to let fastlinear choose.",
        )
