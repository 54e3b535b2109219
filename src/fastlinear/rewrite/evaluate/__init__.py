"""Rewrites tried: verified and timed alone, then together, and kept only if faster."""
