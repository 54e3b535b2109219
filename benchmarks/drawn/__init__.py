"""``fastlinear bench drawn``: cases that nobody picked, drawn at random from what users have."""
