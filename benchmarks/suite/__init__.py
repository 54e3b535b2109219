"""``fastlinear bench models --suite``: model families of the field, small, before and after."""
