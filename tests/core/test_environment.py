"""The environment record is complete, JSON-ready and free of side effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import fastlinear
from fastlinear.core import environment as module
from fastlinear.core.environment import environment, untested


def test_carries_versions_device_threads_and_flags() -> None:
    facts = environment("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["fastlinear"] == fastlinear.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["device"]["kind"] == "cpu"
    assert facts["device"]["slug"]
    assert facts["flags"]["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert "driver" not in facts


def test_flags_follow_the_process() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert environment("cpu")["flags"]["float32_matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_commit_can_be_named_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.COMMIT_VARIABLE, "abc123")
    assert environment("cpu")["commit"] == "abc123"


def test_missing_or_failing_programs_give_none() -> None:
    assert module._output("no-such-program-here") is None
    assert module._output("false") is None
    assert module._version("no-such-package-here") is None


def test_speed_relevant_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert environment("cpu")["variables"]["KMP_BLOCKTIME"] == "1"
    assert "SECRET_TOKEN" not in json.dumps(environment("cpu"))


def test_a_cpu_environment_imports_no_triton_and_wakes_no_gpu() -> None:
    code = (
        "import sys, torch\n"
        "from fastlinear.core.environment import environment\n"
        "environment('cpu')\n"
        "assert 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_untested_versions_are_told() -> None:
    assert untested({"torch": "2.11.0+cu130", "triton": "3.9.1", "transformers": "5.23.0"}) == []
    assert untested({"torch": "2.13.0", "triton": "not installed"}) == []
    told = untested({"torch": "3.0.0", "triton": "3.10.0", "transformers": "5.0.1"})
    assert [line.split(" (")[0] for line in told] == [
        "torch 3.0.0",
        "triton 3.10.0",
        "transformers 5.0.1",
    ]
