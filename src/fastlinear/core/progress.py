"""How long work tells its caller where it stands, without knowing about terminals."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; ``stage`` is a short readable name."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress that says nothing."""
