"""Models to try fastlinear on. Each factory carries its ``example_inputs``."""
