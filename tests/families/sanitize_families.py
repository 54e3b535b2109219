"""compute-sanitizer over small calls of every family's CUDA and Triton kernels (``make sanitize``):

    python -m tests.families.sanitize_families                       every family and tool
    python -m tests.families.sanitize_families --tool memcheck mlp   one of each

Exits 1 when a tool reports an error or a result is wrong. Where it is written down that hazards of
a family's kernel are none (see ``KNOWN``), what racecheck names in that kernel is shown and does
not count. Where compute-sanitizer or a GPU is missing it says so and exits with the code of what is
not supported.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastlinear.core.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
OWN = {"linear_act": "linear", "mlp": "mlp"}
"""Families with calls of their own, and the folder of these."""
"""Families with a script of their own, ``<family>/sanitize.py``."""
FAMILIES = (
    *OWN,
    "gated_mlp",
    "grouped_linear",
    "ragged_linear",
    "unequal_linear",
    "diagonal_linear",
    "experts",
)
REPORTED = 86
"""Exit code of compute-sanitizer where it has something to report."""
WORDS = {("mlp", "racecheck"): ("ordered",)}
"""Words for a family's script: blocks that hand numbers on without barriers are left out."""
KNOWN = {
    ("mlp", "racecheck"): frozenset({"whole_mlp", "whole_mlp_layer"}),
    ("linear_act", "racecheck"): frozenset({"linear_act_gemm"}),
}
"""Kernels of which the family's ORDERING.md says why the hazards that racecheck names are none."""
_KERNEL = re.compile(r"access at ([A-Za-z_]\w*)")


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on the PATH, or of the CUDA toolkit."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = (str(Path(home) / "bin") for home in homes if home)
    paths = (shutil.which("compute-sanitizer", path=p) for p in (None, *folders))
    return next((path for path in paths if path is not None), None)


def command(program: str, family: str, tool: str) -> list[str]:
    """What checks one family with one tool."""
    if family in OWN:
        module = f"tests.families.{OWN[family]}.sanitize"
        script = ["-m", module, *WORDS.get((family, tool), ())]
    else:
        script = ["-m", "tests.families.sanitize_calls", family]
    checked = [program, "--tool", tool, "--error-exitcode", str(REPORTED)]
    return [*checked, sys.executable, *script]


def outcome(family: str, tool: str, code: int, told: str) -> tuple[bool, str]:
    """Whether a run that printed ``told`` is in order, and what to say of it."""
    if code == 0:
        return True, "nothing reported"
    if code == REPORTED:
        kernels = set(_KERNEL.findall(told))
        unknown = sorted(kernels - KNOWN.get((family, tool), frozenset()))
        if unknown or not kernels:
            return False, "errors reported" + (f" in {', '.join(unknown)}" if unknown else "")
        why = f"src/fastlinear/families/{OWN[family]}/ORDERING.md says why these are none"
        return True, f"hazards named in {', '.join(sorted(kernels))}; {why}"
    return False, f"a wrong result, or it did not finish (exit code {code})"


def _run(words: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    """The exit code and all output of a program, shown as it comes."""
    lines = []
    with subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return program.returncode, "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 where all is in order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", nargs="*", choices=[*FAMILIES, []], default=[])
    parser.add_argument("--tool", action="append", choices=TOOLS)
    given = parser.parse_args(arguments)
    program = sanitizer()
    missing = None if torch.cuda.is_available() else "torch.cuda.is_available() is False"
    missing = "no compute-sanitizer on the PATH" if program is None else missing
    if program is None or missing is not None:
        error = UnsupportedError(
            "sanitize",
            "compute-sanitizer and a CUDA device",
            missing or "",
            "The CUDA toolkit has it: set CUDA_HOME or PATH, on a machine with a GPU.",
        )
        print(error, file=sys.stderr)
        return error.exit_code
    found = []
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    for tool in given.tool or TOOLS:
        for family in given.family or FAMILIES:
            print(f"== {family}, {tool}", flush=True)
            code, told = _run(command(program, family, tool), env)
            found.append((family, tool, *outcome(family, tool, code, told)))
    for family, tool, good, words in found:
        print(f"{'ok   ' if good else 'ERROR'} {family}, {tool}: {words}")
    return int(not all(good for _, _, good, _ in found))


if __name__ == "__main__":
    sys.exit(main())
