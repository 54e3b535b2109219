"""Runs the experiment: ``python -m benchmarks.experiments.strassen --device cuda``.

Without a name it runs ``strassen``, four wide layers. ``overhead`` is the grid of the
GPU-overheads document, with the Strassen chain and its control beside all other contenders. The
options are those of ``fastlinear bench``.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.cli import command
from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.strassen import cases, contenders
from benchmarks.harness import pick
from benchmarks.harness.kinds import KINDS

_NAMES = ("strassen", "overhead")


def install() -> None:
    """Make the experiment and its contenders known to the harness of this process."""
    EXPERIMENTS["strassen"] = cases.cases
    KINDS["mlp"] = replace(KINDS["mlp"], peers=contenders.peers)
    pick.PROGRAM = "python -m benchmarks.experiments.strassen"


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code."""
    install()
    named = arguments[:1] and arguments[0] in _NAMES
    given = arguments if named else ["strassen", *arguments]
    run, rest = command(given)
    return run.main(rest, prog_name=pick.PROGRAM, standalone_mode=False) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
