"""Experiment ``models``: what its contenders are made from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contenders import models
from benchmarks.experiments import models as cases_of
from benchmarks.harness.peer import OURS
from fastlinear.core.settings import Config

CASE = cases_of.cases("cpu", quick=True)[0]
ASKED = (f"{OURS}_graphs", f"{OURS}_asked")


@pytest.mark.parametrize("names", [(n,) for n in (*ASKED, OURS)] + [(OURS, *ASKED), (*ASKED, OURS)])
def test_each_case_is_tuned_once_whichever_contenders_run(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some contenders may be left out, or measured already."""
    seen: list[Config] = []

    def optimize_(model: nn.Module, inputs: Any, *, config: Config) -> Any:
        seen.append(config)
        return SimpleNamespace(summary=dict)

    monkeypatch.setattr(models, "optimize_", optimize_)
    work = models.ModelWork(CASE, nn.Linear(4, 4), {"input": torch.ones(2, 4)})
    peers = {p.name: p for p in models.peers(CASE)}
    for name in names:
        peers[name].build(work)
    assert [c.tune for c in seen] == [True] + [False] * (len(seen) - 1)
    assert (seen[0].graphs, seen[0].compile) == (False, False)
    assert len(seen) == len({OURS, *names})
    assert len(work.rewritten) == 1
