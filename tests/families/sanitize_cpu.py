"""Every C++ kernel of the CPU and the autograd node under the address and the undefined-behaviour
sanitizer (``make sanitize``):

    python tests/families/sanitize_cpu.py [--seconds 60]

The project's own builder compiles them with ``$FASTLINEAR_SANITIZE``, into the user's cache beside
the ordinary ones. Then small calls of every backend run, and the fuzzer's, in a process that has
the sanitizer's runtime preloaded; it ends at the first error. Exits 1 where there is one, or a
wrong result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fastlinear.core.errors import UnsupportedError
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.fastpath import library as fastpath_library
from fastlinear.native import cpp_build
from fastlinear.native.compiler import Compiler

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fastlinear"
RUNTIMES = ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so")
_SETTINGS = {
    "FASTLINEAR_SANITIZE": "address,undefined",
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
}


def runtime() -> Path | None:
    """The address sanitizer's library as the compiler brings it, or None."""
    return next((path for name in RUNTIMES if (path := _library(name)) is not None), None)


def preloaded(library: Path) -> str:
    """The sanitizer's library for ``$LD_PRELOAD``, with that of C++: without it, whose exceptions
    the sanitizer looks at from the start, the first one of torch's would end the process."""
    return ":".join(str(p) for p in (library, _library("libstdc++.so.6")) if p is not None)


def _library(name: str) -> Path | None:
    """A library that the compiler brings."""
    compiler = cpp_build.compiler()
    if compiler is None:
        return None
    asked = [*compiler, f"-print-file-name={name}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip())
    return path if done.returncode == 0 and path.is_absolute() and path.exists() else None


def kernels() -> list[Path]:
    """The C++ sources that ``cpp_build`` compiles."""
    fastpath_sources = {fastpath_library.FASTPATH.source, fastpath_library.NODE.source}
    return sorted(p for p in PACKAGE.rglob("*.cpp") if p not in fastpath_sources)


def build_fast_paths() -> None:
    """Compile the fast path and the node, however long that takes."""
    for library in (fastpath_library.FASTPATH, fastpath_library.NODE):
        command = fastpath_library.command(library)
        print(f"compiling {library.source.name}", flush=True)
        places = fastpath_library.places(command, library)
        fastpath_library.compiled(Compiler(polite=False), command, places, library.source.name)


def wrong(seconds: float) -> Iterator[str]:
    """Small calls of all that is sanitized; what is wrong with their results."""
    from tests.families import sanitize_calls
    from tests.fuzz import fuzz

    if sanitize_calls.main((), "cpu"):
        yield "a family's result is wrong"
    pool = fuzz.Pool()
    for op in fuzz.CALLS:
        print(f"== {op}", flush=True)
        for backend in (None, *fuzz.backends(op)):
            for seed in range(6):
                if told := fuzz.run(op, seed, pool, backend):
                    yield told
    for seed in fuzz.seeds(0, seconds):
        for op in fuzz.CALLS:
            if told := fuzz.run(op, seed, pool):
                yield told
    yield from pool.wrong()


def work(seconds: float) -> int:
    """Build, load and call everything; 1 where a result is wrong or nothing could be loaded."""
    os.environ.pop("LD_PRELOAD", None)  # not for the compiler
    build_fast_paths()
    for source in kernels():
        why = cpp_build.why_not_loaded(source)  # some are for processors that this is none of
        print(f"loading {source.name}: {'ok' if why is None else why.partition(chr(10))[0]}")
    if not (lookup.wait() and autograd_node.wait()):
        print(lookup.reason_not() or autograd_node.reason_not())
        return 1
    failures = 0
    for told in wrong(seconds):
        print(told, flush=True)
        failures += 1
    print("sanitizers: nothing reported" + (f", {failures} wrong" if failures else ""))
    return int(failures > 0)


def main() -> int:
    """Run all in a process with the runtime preloaded; 0 where all is in order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the fuzzer's cases")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return work(given.seconds)
    library = runtime()
    if library is None:
        error = UnsupportedError(
            "sanitize",
            "a compiler that brings the address sanitizer's runtime",
            " ".join(cpp_build.compiler() or ("no compiler",)),
            "Install g++, or name it in $CXX.",
        )
        print(error, file=sys.stderr)
        return error.exit_code
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH"))
    env = {**os.environ, **_SETTINGS, "LD_PRELOAD": preloaded(library)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    module = [sys.executable, "-m", "tests.families.sanitize_cpu"]
    words = [*module, "--inside", "--seconds", str(given.seconds)]
    return subprocess.run(words, env=env, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
