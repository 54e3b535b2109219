"""Tests of Triton kernels on whatever is there: a GPU, or Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so a file's interpreted tests run in a
process of their own, which its ``test_under_the_interpreter`` starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_GPU = HAS_TRITON and not INTERPRETED and torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

compares = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="runs in the interpreter test")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]
starts_it = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="starts the interpreted tests")

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        # Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 refuses.
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _patch = interpreter._patch_lang

    def _patch_lang(fn: Any) -> Any:
        # Triton patches its language for a launch, and then again for each function that a kernel
        # calls, a millisecond at a time: what is patched already stays as it is.
        given = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        if given and not any(tl.core.is_builtin(language.load) for language in given):
            return interpreter._LangPatchScope()
        return _patch(fn)

    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang
    # each sum of integers is done again in 64 bits and compared, for an assertion that is left out
    # unless debugging: half of what a kernel takes
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _numpy_type, _known = interpreter._get_np_dtype, dict[str, Any]()

    def _get_np_dtype(kind: Any) -> Any:  # makes a table of all types at every look
        if kind.name not in _known:
            _known[kind.name] = _numpy_type(kind)
        return _known[kind.name]

    interpreter._get_np_dtype = _get_np_dtype
    _splat = interpreter.InterpreterBuilder.create_splat

    def _create_splat(self: Any, kind: Any, value: Any) -> Any:
        # Triton 3.9 spreads a comparison as numbers of the type that it compared, no mask.
        if value.data.dtype == bool:
            value = interpreter.TensorHandle(value.data, tl.int1)
        return _splat(self, kind, value)

    interpreter.InterpreterBuilder.create_splat = _create_splat


def run_interpreted(file: str) -> None:
    """Run a file's tests under the interpreter; fails where they fail, or none runs."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", file, "-q", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    env["CUDA_VISIBLE_DEVICES"] = ""
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout
