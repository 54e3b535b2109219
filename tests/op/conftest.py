"""What tests of recorded calls share."""

from __future__ import annotations

from typing import Any

import pytest

from fastlinear.fastpath import recorder


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was recorded since: a tape or None each."""
    made: list[Any] = []
    record = recorder.record

    def noted(*given: Any, **options: Any) -> Any:
        made.append(record(*given, **options))
        return made[-1]

    monkeypatch.setattr(recorder, "record", noted)
    return made
