"""Error metrics and the one rule of numbers.

A result passes when its error against a float64 oracle is at most ``c`` times the error of
PyTorch's own result in the same dtype, plus a term of a few roundings for cases in which PyTorch
happens to be exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEFAULT_FACTOR = 2.0
_TINY_ROUNDINGS = 2.0  # how many unit roundings are forgiven when torch itself is exact


def relative_error(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """‖actual - oracle‖_F / ‖oracle‖_F, both taken in float64.

    Returns ``inf`` when the shapes differ, or when ``actual`` is not finite where the oracle is.
    Equal non-finite entries (same infinity, NaN where the oracle is NaN) count as no error.
    An all-zero oracle gives the norm of ``actual`` itself.
    """
    if actual.shape != oracle.shape:
        return float("inf")
    a = actual.detach().to(torch.float64)
    o = oracle.detach().to(torch.float64).to(a.device)
    finite = torch.isfinite(o)
    if not bool(finite.all()):
        same = (a == o) | (torch.isnan(a) & torch.isnan(o))
        # A narrow dtype overflows where float64 does not; the reverse is an error.
        if not bool(same[~finite].all()):
            return float("inf")
        a, o = a[finite], o[finite]
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    norm = float(torch.linalg.vector_norm(o))
    diff = float(torch.linalg.vector_norm(a - o))
    return diff / norm if norm > 0 else diff


@dataclass(frozen=True)
class Verdict:
    """The outcome of one comparison.

    Attributes:
        name: what was compared, for example ``"output"`` or ``"grad.weight"``.
        error: our relative error against the oracle.
        torch_error: PyTorch's relative error against the same oracle, in the same dtype.
        limit: the largest error allowed.
    """

    name: str
    error: float
    torch_error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit. NaN never passes."""
        return self.error <= self.limit

    def __str__(self) -> str:
        word = "ok" if self.passed else "FAILED"
        return (
            f"{self.name}: error {self.error:.3g}, torch {self.torch_error:.3g}, "
            f"limit {self.limit:.3g}: {word}"
        )


def judge(
    name: str,
    actual: torch.Tensor,
    torch_result: torch.Tensor,
    oracle: torch.Tensor,
    *,
    factor: float = DEFAULT_FACTOR,
) -> Verdict:
    """Compare ``actual`` with ``torch_result`` (same dtype), both against ``oracle`` (float64).

    Shapes are equal for all three; another shape or dtype than torch's fails. ``limit = factor *
    err(torch) + tiny`` where ``tiny`` is two unit roundings of torch's dtype. Entries at which
    torch itself is not finite though the oracle is (overflow of a narrow dtype) are judged apart:
    there the result must equal torch's or be finite.
    """
    tiny = _TINY_ROUNDINGS * unit_rounding(torch_result.dtype)
    torch_error = relative_error(torch_result, oracle)
    if actual.dtype != torch_result.dtype:
        return Verdict(name, float("inf"), torch_error, factor * torch_error + tiny)
    error = relative_error(actual, oracle)
    if torch_error != float("inf"):
        return Verdict(name, error, torch_error, factor * torch_error + tiny)
    # PyTorch itself overflows somewhere. There the result must be what torch has or be finite;
    # elsewhere the rule holds on what is left.
    if actual.shape == oracle.shape == torch_result.shape:
        t, a, o = torch_result.detach(), actual.detach(), oracle.detach()
        same = (a == t) | (torch.isnan(a) & torch.isnan(t))
        rest = torch.isfinite(t)
        if bool((same | (torch.isfinite(a) & torch.isfinite(o)))[~rest].all()):
            error, base = relative_error(a[rest], o[rest]), relative_error(t[rest], o[rest])
            return Verdict(name, error, torch_error, factor * base + tiny)
    return Verdict(name, error, torch_error, tiny)


def unit_rounding(dtype: torch.dtype) -> float:
    """Half the spacing of the dtype's numbers at 1, the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2
