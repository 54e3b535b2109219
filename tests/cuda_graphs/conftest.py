"""On the CPU a tape acts as CUDA graphs do; on a GPU they are real ones."""

from __future__ import annotations

import pytest

from fastlinear.cuda_graphs import graphed as module_of_graphed
from tests.core.graph_tape import TapeRecorder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(module_of_graphed, "CudaRecorder", TapeRecorder)
    return str(request.param)
