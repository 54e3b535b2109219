"""Every error fastlinear raises on purpose.

Each message names the function, what it expected, what it received and a remedy, so that the
reader can act without opening the source.
"""

from __future__ import annotations


class FastlinearError(Exception):
    """Base class of all errors raised by fastlinear.

    Attributes:
        exit_code: the exit status the command line returns for this error.
    """

    exit_code = 1

    def __init__(self, function: str, *, expected: str, received: str, remedy: str) -> None:
        self.function = function
        self.expected = expected
        self.received = received
        self.remedy = remedy
        super().__init__(f"{function}: expected {expected}; received {received}. {remedy}")


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
