"""The user's tuned cache: one JSON file a device, written atomically under a lock.

A corrupt, foreign or unreadable file is ignored with one warning; a read-only folder costs one
warning and nothing else. Entries are keyed by the Problem's bucket and stay valid only while the
sources of the backends they compare and the torch version are unchanged.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fastlinear.core import files
from fastlinear.core.device import device_facts
from fastlinear.core.errors import CacheWarning, UnsupportedError
from fastlinear.core.interrupts import whole
from fastlinear.core.plain_text import plain
from fastlinear.core.problem import Problem
from fastlinear.core.settings import cache_dir
from fastlinear.dispatch.backend import Backend

FORMAT = 1
_LOCK_TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 20  # an entry has about one KiB
_UNFIT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

_loaded: dict[Path, dict[str, Any]] = {}
_warned: set[str] = set()
_listeners: list[Callable[[], None]] = []
_changes = 0
_on_disk = True


@dataclass(frozen=True)
class Entry:
    """One tuned decision.

    Attributes:
        best: the winning backend.
        times_us: backend → median microseconds.
        doubt: why the measurement leaves the decision open, in words; ``""`` where it does not.
        rivals: the measured backends that may be faster than the winner within noise. Where one of
            them is the choice without this measurement, it stays so.
    """

    best: str
    times_us: dict[str, float]
    doubt: str = ""
    rivals: tuple[str, ...] = ()

    def story(self) -> str:
        """One sentence for explain."""
        listing = ", ".join(
            f"{name} {us:.1f} us" for name, us in sorted(self.times_us.items(), key=lambda i: i[1])
        )
        open_ = f"; in doubt: {self.doubt}; tune again when it is quiet" if self.doubt else ""
        if min(self.times_us.values(), default=0.0) < self.times_us.get(self.best, 0.0):
            return (
                f"no other was faster beyond noise when this machine was tuned ({listing}){open_}"
            )
        return f"fastest when this machine was tuned ({listing}){open_}"


def cache_path(device: str) -> Path:
    """Where the tuned cache of a device lives. Threads are part of a CPU's name."""
    facts = device_facts(device)
    suffix = f"-{facts.units}threads" if facts.kind == "cpu" else ""
    return cache_dir() / f"tuned-{facts.slug}{suffix}.json"


def tuned(problem: Problem, able: Sequence[Backend]) -> Entry | None:
    """The cached decision for this Problem, or None when there is none or it is stale."""
    data = _read(cache_path(problem.device))
    item = data.get(problem.key())
    if item is None or not _valid(item, able):
        return None
    doubt = item.get("doubt", "")
    every = [name for name in item["times_us"] if name != item["best"]] if doubt else []
    rivals = tuple(item.get("rivals", every))  # entries of before they were kept: any may be one
    return Entry(item["best"], dict(item["times_us"]), doubt, rivals)


def store(
    problem: Problem,
    able: Sequence[Backend],
    best: str,
    times_us: dict[str, float],
    doubt: str = "",
    rivals: Sequence[str] | None = None,
) -> bool:
    """Write one decision, what leaves it in doubt, and which backends may be faster than its
    winner within noise (by default all others where there is a doubt).

    One in doubt does not replace a valid one of the same backends that is not: any other does.
    Returns False where it was not written for that reason, or (after one warning) where the folder
    cannot be.
    """
    path = cache_path(problem.device)
    if rivals is None:
        rivals = [name for name in times_us if name != best] if doubt else []
    item: dict[str, Any] = {
        "best": best,
        "times_us": times_us,
        "doubt": doubt,
        "rivals": list(rivals),
        "torch": torch.__version__,
        "hashes": {b.name: b.source_hash() for b in able if b.name in times_us},
        "problem": problem.bucketed().to_json(),
    }
    key = problem.key()
    if not _on_disk:
        held = _loaded.setdefault(path, {})
        if not _firmer(held.get(key), item):
            held[key] = item
            changed()
        return False
    try:
        files.make_folder(path.parent)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            entries = _parse(path)
            stays = _firmer(entries.get(key), item)
            if not stays:
                entries[key] = item
                _replace(path, entries)
            _loaded[path] = entries
    except (OSError, Timeout) as error:
        _warn(f"the tuned cache {path} cannot be written ({error}); choices last this process only")
        held = _read(path)
        if not _firmer(held.get(key), item):
            held[key] = item
        return False
    finally:
        changed()
    return not stays


def _valid(item: dict[str, Any], able: Sequence[Backend]) -> bool:
    """Whether a stored decision is of this torch and of the sources as they are."""
    hashes = {b.name: b.source_hash() for b in able if b.name in item["hashes"]}
    return bool(item["torch"] == torch.__version__ and hashes == item["hashes"])


def _firmer(known: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Whether a stored decision between the same backends is not in doubt and the new one is."""
    if known is None or known.get("doubt") or not new["doubt"]:
        return False
    return bool(known["torch"] == new["torch"] and known["hashes"] == new["hashes"])


@whole
def in_memory() -> Iterator[None]:
    """Inside it the cache starts empty, and decisions neither come from the disk nor reach it."""
    global _loaded, _on_disk
    kept = _loaded, _on_disk
    _loaded, _on_disk = {}, False
    changed()
    try:
        yield
    finally:
        _loaded, _on_disk = kept
        changed()


def changes() -> int:
    """How often that was so: a decision begun before the last one is not to be kept."""
    return _changes


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever the cache changes, so that resolved choices can be dropped."""
    _listeners.append(listener)


def entries(device: str) -> dict[str, Any]:
    """Everything cached for a device, key → raw entry."""
    return dict(_read(cache_path(device)))


def clear(device: str) -> int:
    """Delete a device's tuned cache; returns how many entries it held.

    Raises UnsupportedError where the file or its folder cannot be written.
    """
    path = cache_path(device)
    count = len(_read(path))
    if path.exists():
        try:
            with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
                path.unlink(missing_ok=True)
        except (OSError, Timeout) as error:
            raise UnsupportedError(
                "cache.clear",
                "a tuned cache that can be removed",
                str(error),
                "Remove it by hand, or set FASTLINEAR_CACHE_DIR to another folder.",
            ) from error
    _loaded.pop(path, None)
    changed()
    return count


def forget() -> None:
    """Drop what this process has read, so that the next selection reads the file again."""
    _loaded.clear()
    _warned.clear()
    changed()


def changed() -> None:
    """Have all that was decided before decided anew."""
    global _changes
    _changes += 1
    for listener in _listeners:
        listener()


def _read(path: Path) -> dict[str, Any]:
    if path not in _loaded:
        _loaded[path] = _parse(path) if _on_disk else {}
    return _loaded[path]


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = files.read(path, _MOST_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn(f"the tuned cache {path} cannot be read ({error}); ignored")
        return {}
    try:
        data = json.loads(content)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a fastlinear cache of format {FORMAT}")
        entries = data["entries"]
        for item in entries.values():
            if not isinstance(item["best"], str) or not isinstance(item["times_us"], dict):
                raise ValueError("an entry lacks its fields")
            if not isinstance(item["hashes"], dict) or not isinstance(item["torch"], str):
                raise ValueError("an entry lacks its fields")
            if not all(isinstance(us, (int, float)) for us in item["times_us"].values()):
                raise ValueError("an entry's times are not numbers")
            if not isinstance(item.get("doubt", ""), str):
                raise ValueError("an entry's doubt is no text")
            rivals = item.get("rivals", [])
            if not isinstance(rivals, list) or not all(isinstance(n, str) for n in rivals):
                raise ValueError("an entry's rivals are no list of names")
            Problem.from_json(item["problem"])
    except _UNFIT as error:
        _warn(
            f"the tuned cache {path} is corrupt or foreign ({error}); ignored. "
            "The next tuning replaces it; `fastlinear cache clear` removes it."
        )
        return {}
    return dict(entries)


def _replace(path: Path, entries: dict[str, Any]) -> None:
    # Only the holder of the lock writes here, so any such file is what a killed writer left.
    for stale in path.parent.glob(f".{path.name}.*"):
        stale.unlink(missing_ok=True)
    text = json.dumps({"format": FORMAT, "entries": entries}, indent=1, sort_keys=True)
    files.replace(path, text.encode())


def _warn(message: str) -> None:
    message = plain(message)
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, CacheWarning, stacklevel=3)
