"""Launch configurations timed and fitted: ``python -m benchmarks.experiments.configurations``."""
