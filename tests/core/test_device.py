"""What a processor says of itself."""

from __future__ import annotations
