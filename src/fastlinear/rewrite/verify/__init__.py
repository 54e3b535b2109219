"""Whether a rewritten model computes what the original does."""
