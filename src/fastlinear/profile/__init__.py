"""Where a model's time goes and what of it is wasted: model → records, sites, findings."""

from fastlinear.profile.capture import profile
from fastlinear.profile.records import Finding, LinearSite, ProfileReport, Record

__all__ = ["Finding", "LinearSite", "ProfileReport", "Record", "profile"]
