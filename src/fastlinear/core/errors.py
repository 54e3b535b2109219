"""Every error fastlinear raises on purpose.

Each message names the function, what it expected, what it received and a remedy, so that the
reader can act without opening the source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlinear.core.plain_text import plain


class FastlinearError(Exception):
    """Base class of all errors raised by fastlinear.

    Made of four texts by position and without a constructor of its own, which torch.compile could
    not follow: so the error it raises under ``fullgraph=True`` shows them, and in a call that may
    leave the graph this error itself arrives.

    Attributes:
        exit_code: the exit status the command line returns for this error.
    """

    exit_code = 1

    if TYPE_CHECKING:

        def __init__(self, function: str, expected: str, received: str, remedy: str, /) -> None: ...

    @property
    def function(self) -> str:
        """Which function refuses."""
        return str(self.args[0])

    @property
    def expected(self) -> str:
        """What it takes."""
        return str(self.args[1])

    @property
    def received(self) -> str:
        """What it was given."""
        return str(self.args[2])

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return str(self.args[3])

    def __str__(self) -> str:
        return plain(
            f"{self.function}: expected {self.expected}; received {self.received}. {self.remedy}"
        )


class InputError(FastlinearError, ValueError):
    """An argument has the wrong shape, dtype, device, name or value."""

    exit_code = 2


class PlanError(InputError):
    """A plan file is corrupt, of another version, or made for another model or machine."""


class ModelLoadError(InputError):
    """A model or inputs factory cannot be imported, raises, or returns the wrong thing."""


class NumericsError(FastlinearError, ArithmeticError):
    """A rewritten model or a backend is less accurate than the rule of numbers allows."""

    exit_code = 3


class UnsupportedError(FastlinearError, RuntimeError):
    """A forced backend cannot serve a problem, or the environment lacks something needed."""

    exit_code = 5


class CacheWarning(UserWarning):
    """The tuned cache could not be read or written; selection goes on without it."""


class NotYetError(Exception):
    """A library is still being compiled, and the patience that was allowed is at its end."""


FOREIGN_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What code of others may raise on a probe's input, which it was not written for."""


def not_invariant(function: str, received: str) -> UnsupportedError:
    """The error of a call that cannot be served so that its rows do not depend on each other."""
    return UnsupportedError(
        function,
        "a batch-invariant call of plain tensors on a CPU or CUDA device",
        received,
        "Switch it off by batch_invariant(False), or name another backend.",
    )
