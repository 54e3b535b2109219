"""One process that compiles ahead (``python -m benchmarks.harness.precompile_worker``).

Tasks come as lines of JSON on stdin, answers go as lines to stdout; it ends with its stdin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from filelock import FileLock

from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.measure import build_and_call, first_line, release


def main(told: str) -> None:
    """Serve tasks until stdin ends."""
    settings = json.loads(told)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    device = torch.device(settings["device"])
    torch.set_num_threads(settings["threads"])
    if torch.get_float32_matmul_precision() != settings["precision"]:
        # setting the default would differ from never having set it in Inductor's keys
        torch.set_float32_matmul_precision(settings["precision"])
    if device.index is not None:
        torch.cuda.set_device(device)
    time_alone(FileLock(settings["lock"], thread_local=False))
    for line in sys.stdin:
        task = json.loads(line)
        failures: list[str] = []
        for data in task["cases"]:
            failures += prepare(Case.from_json(data), frozenset(task["peers"]), device)
        print(json.dumps(failures), file=answers, flush=True)
        gc.freeze()  # compilers leave much that every later collection would look at


def prepare(case: Case, names: frozenset[str], device: torch.device) -> list[str]:
    """Call the named contenders of a case once; what failed, each with its reason."""
    failures = []
    try:
        work = KINDS[case.family].make_work(case, device)
        for peer in KINDS[case.family].peers(case):
            if peer.name in names:
                try:
                    build_and_call(peer, work)
                except Exception as error:  # noqa: BLE001 - the others go on
                    failures.append(f"{case.name}, {peer.name}: {_said(error)}")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - the next case goes on
        failures.append(f"{case.name}: {_said(error)}")
    release(device, kept=0.0)
    return failures


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def time_alone(lock: FileLock) -> None:
    """Have Inductor time kernels under a lock that all processes share.

    The lock is held for one timing, and for all timings of a product, whose results Inductor then
    adds to one file: it reads that file, times, and writes it again.
    """
    from torch._inductor import codecache
    from torch._inductor.runtime import benchmarking

    hook: Any = getattr(benchmarking, "set_gpu_benchmark_lock_context", None)
    if hook is not None:
        hook(lambda: lock)
    else:  # torch before 2.13
        timer: Any = benchmarking.benchmarker
        timer.benchmark_gpu = _holding(lock, timer.benchmark_gpu)
    products: Any = codecache.PersistentCache
    products.lookup = _holding(lock, products.lookup)


def _holding(lock: FileLock, call: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return call(*arguments, **options)

    return locked


if __name__ == "__main__":
    main(sys.argv[1])
