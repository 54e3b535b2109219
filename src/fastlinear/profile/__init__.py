"""Where a model's time goes and what of it is wasted: model → records, sites, findings."""

from fastlinear.profile.capture import profile
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.report import ProfileReport

__all__ = ["Finding", "LinearSite", "ProfileReport", "Record", "profile"]
