"""Where a model's time goes and what of it is wasted: model → records, sites, findings."""
