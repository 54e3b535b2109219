"""Error metrics and the one rule of numbers.

A result passes when its error against a float64 oracle is at most ``c`` times the error of
PyTorch's own result in the same dtype, plus a term of a few roundings for cases in which PyTorch
happens to be exact.

On one draw of inputs both errors are samples. Where few roundings make up all of a result, as in a
gradient of one bias, one of two equally large errors is often more than twice the other. What fails
on one draw is therefore judged over ``DRAWS`` of them as one result, by the same rule
(``over_draws``).

Gradients behind a kink (relu, leaky_relu at 0) need one thing more. There the derivative is a set
of numbers, and a pre-activation that is 0 but for rounding lies on one side in one correct
implementation and on the other in the next: gradients then differ by a whole row. Nothing is
tolerated for it. Either a run is judged against the oracle that takes the run's own side at those
elements and only there (``other_side``), or, where a run does not show its sides, the inputs are
chosen so that there are no such elements (``clear_of_kinks``), or nothing comes back through them
(``silent_at_kinks``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

DEFAULT_FACTOR = 2.0
_TINY_ROUNDINGS = 2.0  # how many unit roundings are forgiven when torch itself is exact
# a float64 oracle adds in some order, too: torch's error against it is 0 where that is torch's own
_TINY_ROUNDINGS_FLOAT64 = 16.0
DRAWS = 24
"""Draws of inputs that judge what fails on one of them."""
_CLEAR_DRAWS, _CLEAR_TIMES = 8, 2.0  # draws, and times over or under the limit, that end doubts
_MANY_ROWS = 64  # if all of so many rows are near a kink, nearly every other row will be as well
KINKED = frozenset({"relu", "leaky_relu"})
"""Activations whose derivative jumps at 0."""


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
        numbers: how many numbers there were, where they were counted.
        not_finite: at how many of them PyTorch's result or the oracle's is infinite or NaN. There
            nothing is measured: they must only be the same.
        unproven: why the comparison shows nothing, such as that no number is finite; else ``""``.
        norm: of the oracle's finite numbers, which makes errors of several draws comparable.
    """

    name: str
    error: float
    torch_error: float
    limit: float
    numbers: int = 0
    not_finite: int = 0
    unproven: str = ""
    norm: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit. NaN and what shows nothing never pass."""
        return not self.unproven and self.error <= self.limit

    def __str__(self) -> str:
        if self.unproven:
            return f"{self.name} cannot be verified: {self.unproven}"
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
    err(torch) + tiny`` where ``tiny`` is two unit roundings of torch's dtype (16 of float64, whose
    oracle is no more exact than the result). Entries at which
    torch itself is not finite though the oracle is (overflow of a narrow dtype) are judged apart:
    there the result must equal torch's or be finite. Where no number of torch's and of the oracle
    is finite, or torch's are where the oracle's are not, the verdict is ``unproven``.
    """
    verdict = _judged(name, actual, torch_result, oracle, factor)
    wide = oracle.detach().to(torch.float64)
    norm = float(torch.linalg.vector_norm(torch.where(torch.isfinite(wide), wide, 0.0)))
    return counted(replace(verdict, norm=norm), torch_result, oracle)


def pooled(each: Sequence[Verdict]) -> Verdict:
    """The verdicts of one result on several draws as one: as if all their numbers were one result.

    Errors and limits count by the oracle's norms, so that a draw of small numbers decides no more
    than it holds. The first verdict stands where it shows nothing; later ones that do are left out.
    """
    first = each[0]
    if first.unproven:
        return first
    each = [v for v in each if not v.unproven]
    whole = math.hypot(*(v.norm for v in each))

    def together(values: Iterable[float]) -> float:
        # an all-zero oracle leaves errors as they are
        found = math.hypot(*(x * (v.norm or 1.0) for x, v in zip(values, each, strict=True)))
        return found / whole if whole > 0 else found

    return replace(
        first,
        error=together(v.error for v in each),
        torch_error=together(v.torch_error for v in each),
        limit=together(v.limit for v in each),
        numbers=sum(v.numbers for v in each),
        not_finite=sum(v.not_finite for v in each),
        norm=whole,
    )


def over_draws(
    first: Mapping[str, Sequence[Verdict]],
    again: Callable[[int, Sequence[str]], Mapping[str, Sequence[Verdict]]],
    draws: int = DRAWS,
) -> dict[str, list[Verdict]]:
    """Verdicts of several contenders; of one that fails on the first draw, those over ``DRAWS``.

    The first draw counts with the others. A contender is judged no further once its errors leave no
    doubt: infinite, or over some draws far from the limit.

    Args:
        first: contender → its verdicts on the first draw, one for each result.
        again: (which draw, from 1 on, the contenders to judge) → their verdicts on that draw; one
            that it leaves out is judged no further.
        draws: the most, the first one included.
    """
    found = {name: [[v] for v in verdicts] for name, verdicts in first.items()}
    for draw in range(1, draws):
        names = [name for name, columns in found.items() if _in_doubt(columns, draw)]
        if not names:
            break
        for name, verdicts in again(draw, names).items():
            for column, verdict in zip(found[name], verdicts, strict=True):
                column.append(verdict)
    return {name: [pooled(column) for column in columns] for name, columns in found.items()}


def _in_doubt(columns: Sequence[Sequence[Verdict]], draws: int) -> bool:
    """Whether more draws are to judge a contender that has been judged on so many."""
    if any(len(column) < draws for column in columns):
        return False  # it was left before
    if all(column[0].passed or column[0].unproven for column in columns):
        return False
    whole = [v for v in map(pooled, columns) if not v.unproven]
    if any(v.error == float("inf") for v in whole):
        return False
    over = any(v.error > _CLEAR_TIMES * v.limit for v in whole)
    under = all(_CLEAR_TIMES * v.error <= v.limit for v in whole)
    return draws < _CLEAR_DRAWS or not (over or under)


def counted(verdict: Verdict, torch_result: torch.Tensor, oracle: torch.Tensor) -> Verdict:
    """The verdict with the numbers that are not finite, and ``unproven`` where it shows nothing.

    A verdict that fails by an infinite error (a finite number for a NaN, say) stays one that fails.
    """
    if torch_result.shape != oracle.shape:
        return verdict
    exact = torch.isfinite(oracle.detach())
    own = torch.isfinite(torch_result.detach()).to(exact.device)
    if bool((exact & own).all()):
        return replace(verdict, numbers=exact.numel())
    total, lost = exact.numel(), int((~(exact & own)).sum())
    verdict = replace(verdict, numbers=total, not_finite=lost)
    strangers = int((own & ~exact).sum())
    if strangers:
        text = f"the oracle's are not finite where PyTorch's are: {strangers} of {total} numbers"
        return replace(verdict, unproven=text)
    if lost < total or verdict.error > verdict.limit:
        return verdict
    whose = "PyTorch's, unlike the oracle's, are" if bool(exact.any()) else "the oracle's are"
    return replace(verdict, unproven=f"{whose} not finite: {lost} of {total} numbers")


def _judged(
    name: str,
    actual: torch.Tensor,
    torch_result: torch.Tensor,
    oracle: torch.Tensor,
    factor: float,
) -> Verdict:
    roundings = _TINY_ROUNDINGS
    if torch_result.dtype == torch.float64:
        roundings = _TINY_ROUNDINGS_FLOAT64
    tiny = roundings * unit_rounding(torch_result.dtype)
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
            base = relative_error(t[rest], o[rest])
            if base != float("inf"):
                error = relative_error(a[rest], o[rest])
                return Verdict(name, error, torch_error, factor * base + tiny)
    return Verdict(name, error, torch_error, tiny)


def unit_rounding(dtype: torch.dtype) -> float:
    """Half the spacing of the dtype's numbers at 1, the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


# --------------------------------------------------------------------------------------------
# Kinks


def other_side(
    pre: torch.Tensor,
    exact: torch.Tensor,
    torch_output: torch.Tensor,
    own_output: torch.Tensor,
    *,
    factor: float = DEFAULT_FACTOR,
) -> torch.Tensor:
    """Where the oracle must take the other side of a kink at 0 to judge one run's gradients.

    These are the elements at which the run's side differs from the oracle's and ``|pre| <= factor
    * max |torch_output - exact|``: as near 0 as the forward errors that the rule of numbers allows.
    Anywhere else the oracle keeps its own side, so that a wrong derivative is still one.

    Args:
        pre: the oracle's pre-activations, of any shape.
        exact: the oracle's activated outputs, of that shape.
        torch_output: PyTorch's outputs in the dtype under test, of that shape.
        own_output: outputs of the run to be judged, of that shape; only whether they are
            above 0 counts, as for the derivatives of relu and leaky_relu.
        factor: ``c`` of the rule.

    Returns:
        Booleans of that shape; all False when PyTorch's own outputs are not finite.
    """
    reach = factor * _largest_error(exact, torch_output)
    if not reach < float("inf"):
        return torch.zeros_like(pre, dtype=torch.bool)
    return (pre.detach().abs() <= reach) & ((exact.detach() > 0) != (own_output.detach() > 0))


def silent_at_kinks(
    dy: torch.Tensor,
    exact: torch.Tensor,
    own: torch.Tensor,
    *,
    factor: float = DEFAULT_FACTOR,
) -> torch.Tensor:
    """The gradient of an activated layer's output with zeros where rounding decides the side of a
    kink, so that gradients do not depend on the side an implementation takes there.

    For layers so wide that ``clear_of_kinks`` finds no inputs. An element is near a kink when its
    pre-activation is at most ``factor`` times the largest error that PyTorch's own show.

    Args:
        dy: gradients, of any shape; left as they are.
        exact: pre-activations of that shape in float64.
        own: PyTorch's own in dy's dtype.
        factor: ``c`` of the rule.
    """
    reach = factor * _largest_error(exact, own)
    if not reach < float("inf"):
        return dy  # what overflows is to be seen
    return dy.masked_fill(exact.abs() <= reach, 0.0)


def clear_of_kinks(
    x: torch.Tensor,
    pre_activations: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    redraw: Callable[[int], torch.Tensor],
    *,
    factor: float = DEFAULT_FACTOR,
) -> tuple[torch.Tensor, int]:
    """Inputs on which rounding does not decide a sign: x with the rows near a kink drawn again.

    A row is near a kink when one of its pre-activations in float64 is at most ``factor`` times the
    largest error that PyTorch's own pre-activations in x's dtype show in that layer. Without such
    rows every correct implementation takes the same sides, and gradients are judged by the strict
    rule whatever computed them.

    Args:
        x: (M, K), in the dtype under test; left as it is.
        pre_activations: rows (m, K) in x's dtype or in float64 → the pre-activations (m, N) of
            every kinked layer in that dtype, in order; called without gradients.
        redraw: m → m new rows (m, K) in x's dtype.
        factor: ``c`` of the rule.

    Returns:
        The inputs, detached, and how many rows are still near a kink. In 16-bit dtypes that may be
        all of them: there elements near a kink are so many that each implementation has about as
        many, and their errors compare as any others do. Then it gives up early.
    """
    found = x.detach().clone()
    waiting = torch.arange(len(found), device=found.device)
    reaches: list[float] = []
    left = 4 * len(found) + _MANY_ROWS  # how many more rows may be drawn
    with torch.no_grad():
        while len(waiting):
            rows = found[waiting]
            near = torch.zeros(len(rows), dtype=torch.bool, device=found.device)
            layers = zip(pre_activations(rows.double()), pre_activations(rows), strict=True)
            for i, (exact, own) in enumerate(layers):
                reach = factor * _largest_error(exact, own)
                if i == len(reaches):
                    reaches.append(reach)
                reaches[i] = max(reaches[i], reach)  # few rows show less than all of them did
                near |= (exact.abs() <= reaches[i]).any(1)
            waiting = waiting[near]
            hopeless = len(waiting) == len(rows) >= _MANY_ROWS
            if hopeless or len(waiting) > left:
                break
            left -= len(waiting)
            found[waiting] = redraw(len(waiting))
    return found, len(waiting)


def _largest_error(exact: torch.Tensor, own: torch.Tensor) -> float:
    if exact.numel() == 0:
        return 0.0
    return float((own.detach().double() - exact.detach().double()).abs().max())
