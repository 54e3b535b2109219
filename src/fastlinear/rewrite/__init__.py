"""Rewriting models in place: match, plan, verify, apply, undo."""

from fastlinear.rewrite.apply import apply_
from fastlinear.rewrite.optimize import optimize_
from fastlinear.rewrite.plan import Plan, Rewrite
from fastlinear.rewrite.result import Result
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.survey import profile

__all__ = ["Plan", "Result", "Rewrite", "SiteOutcome", "apply_", "optimize_", "profile"]
