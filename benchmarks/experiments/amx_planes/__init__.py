"""A study: float32 products by AMX, from bfloat16 planes."""
