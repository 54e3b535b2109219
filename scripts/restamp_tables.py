"""Re-stamp the source hashes of shipped tables after a change that compiles to the same kernels.

    python scripts/restamp_tables.py REVISION [--only FAMILY.PIECE.BACKEND ...]

A hash that was current at REVISION becomes that of the working tree; a stale one stays. Compare
what the backends' sources compile to first: nothing here does. Every other byte of the tables stays
as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "src" / "fastlinear" / "dispatch" / "tables"
_HASHES = """
import json, fastlinear
from fastlinear.dispatch.backend import families
backends = [b for f in families().values() for b in f.backends]
print(json.dumps({f"{b.family}.{b.piece}.{b.name}": b.source_hash() for b in backends}))
"""


def hashes(tree: Path) -> dict[str, str]:
    """FAMILY.PIECE.BACKEND → the hash of its sources in a tree of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", _HASHES]
    done = subprocess.run(command, env=environment, cwd=tree, check=True, capture_output=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Rewrite the tables in place and say what changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revision", help="the last commit before the change")
    parser.add_argument("--only", nargs="*", help="backends; all that changed if left out")
    given = parser.parse_args()
    archive = subprocess.run(
        ["git", "archive", given.revision, "src"], cwd=ROOT, check=True, capture_output=True
    )
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        before = hashes(Path(folder))
    after = hashes(ROOT)
    changed = {
        name: (before[name], after[name])
        for name in given.only or before
        if name in after and after[name] != before[name]
    }
    for path in sorted(TABLES.glob("*.json")):
        text = path.read_text()
        for name, (old, new) in changed.items():
            backend = name.rpartition(".")[2]
            entry = f'"{backend}": "{old}"'
            if entry in text:
                print(f"{path.name}: {name} {old} → {new}, {text.count(entry)} entries")
                text = text.replace(entry, f'"{backend}": "{new}"')
        path.write_text(text)


if __name__ == "__main__":
    main()
