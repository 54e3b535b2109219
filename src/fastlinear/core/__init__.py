"""Ground floor: problems, device facts, settings, errors, precision, error metrics, clock, cost."""
