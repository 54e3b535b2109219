"""The tuned cache: atomic, locked, and never in the way when it is damaged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastlinear as fl
from fastlinear.core import files
from fastlinear.core.errors import CacheWarning
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.select import select
from fastlinear.families.linear.problem import problem
from fastlinear.families.linear.spec import FRONT

WRITER = """
    import sys
    from fastlinear.dispatch import cache
    from fastlinear.dispatch.backend import family
    from fastlinear.families.linear.problem import problem
    import torch
    torch.set_num_threads(1)
    backends = [b for b in family("linear_act").candidates("forward") if b.name == "eager"]
    first, count = int(sys.argv[1]), int(sys.argv[2])
    print("ready", flush=True)
    for k in range(first, first + count):
        p = problem("forward", 8, k, 16, dtype="float32", device="cpu")
        assert cache.store(p, backends, "eager", {"eager": 1.0})
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The cache file's name holds the thread count; child processes use one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def example(k: int = 32) -> Problem:
    return relu_call(8, k)


def relu_call(m: int, k: int) -> Problem:
    return problem(
        "forward",
        m,
        k,
        16,
        dtype="float32",
        device="cpu",
        activation="relu",
        precision=torch.get_float32_matmul_precision(),
    )


def backends(*names: str) -> list[Backend]:
    return [b for b in family("linear_act").candidates("forward") if b.name in names]


def store(best: str = "onednn", k: int = 32) -> bool:
    times = {"eager": 2.0, "onednn": 1.0}
    return cache.store(example(k), backends("eager", "onednn"), best, times)


def read(k: int = 32) -> cache.Entry | None:
    cache.forget()
    return cache.tuned(example(k), backends("eager", "onednn"))


def writer(first: int, count: int) -> subprocess.Popen[str]:
    code = textwrap.dedent(WRITER)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(first), str(count)], stdout=subprocess.PIPE, text=True
    )


def damage(content: bytes) -> Path:
    path = cache.cache_path("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    cache.forget()
    return path


def test_roundtrip_through_the_disk() -> None:
    assert read() is None
    assert store()
    entry = read()
    assert entry is not None
    assert (entry.best, entry.times_us) == ("onednn", {"eager": 2.0, "onednn": 1.0})
    assert "onednn 1.0 us, eager 2.0 us" in entry.story()
    assert entry.story().startswith("fastest")
    noise = cache.Entry("eager", {"onednn": 1.9, "eager": 2.0})
    assert noise.story().startswith("no other was faster beyond noise")
    assert read(k=33) is None
    assert list(cache.entries("cpu")) == [example().key()]
    assert cache.clear("cpu") == 1
    assert read() is None
    assert cache.clear("cpu") == 0


def test_entry_serves_its_whole_bucket() -> None:
    store()
    able = backends("eager", "onednn")
    assert cache.tuned(relu_call(9, 32), able) is not None
    assert cache.tuned(relu_call(16, 32), able) is None


VALID_ENTRY = {"best": "eager", "times_us": {"eager": 1.0}, "torch": "x", "hashes": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00garbage\x80",
        b"null",
        b"[]",
        b'"text"',
        b'{"format": 1}',
        b'{"format": 1, "entries": []}',
        b'{"format": 1, "entries": {"k": null}}',
        b'{"format": 1, "entries": {"k": {}}}',
        json.dumps({"format": 2, "entries": {"k": VALID_ENTRY}}).encode(),
        json.dumps({"format": 1, "entries": {"k": {**VALID_ENTRY, "best": 3}}}).encode(),
        json.dumps({"format": 1, "entries": {"k": {**VALID_ENTRY, "hashes": []}}}).encode(),
        json.dumps({"format": 1, "entries": {"k": {**VALID_ENTRY, "torch": None}}}).encode(),
        json.dumps(
            {"format": 1, "entries": {"k": {**VALID_ENTRY, "times_us": {"eager": "fast"}}}}
        ).encode(),
        b"[" * 100_000,
    ],
)
def test_damaged_file_costs_one_warning(content: bytes) -> None:
    damage(content)
    with pytest.warns(CacheWarning, match="corrupt or foreign") as caught:  # noqa: PT031
        assert [cache.tuned(example(), backends("eager")) for _ in range(2)] == [None, None]
        y = fl.linear_act(torch.ones(2, 3), torch.ones(4, 3), activation="relu")
    assert len(caught) == 1
    assert y.shape == (2, 4)


def test_a_doubt_that_is_no_text_is_damage() -> None:
    store()
    data = json.loads(cache.cache_path("cpu").read_text())
    next(iter(data["entries"].values()))["doubt"] = 3
    damage(json.dumps(data).encode())
    with pytest.warns(CacheWarning, match="doubt is no text"):
        assert cache.tuned(example(), backends("eager", "onednn")) is None


@pytest.mark.parametrize("rivals", [3, "onednn", [3]])
def test_rivals_that_are_no_names_are_damage(rivals: object) -> None:
    store()
    data = json.loads(cache.cache_path("cpu").read_text())
    next(iter(data["entries"].values()))["rivals"] = rivals
    damage(json.dumps(data).encode())
    with pytest.warns(CacheWarning, match="rivals are no list of names"):
        assert cache.tuned(example(), backends("eager", "onednn")) is None


def test_an_entry_in_doubt_that_names_no_rivals_may_have_any() -> None:
    assert decided("a close rival")
    data = json.loads(cache.cache_path("cpu").read_text())
    for item in data["entries"].values():
        del item["rivals"]
    damage(json.dumps(data).encode())
    entry = read()
    assert entry is not None
    assert entry.rivals == ("onednn",)


def test_tuning_replaces_a_damaged_file() -> None:
    path = damage(b"{ truncated")
    with pytest.warns(CacheWarning):
        assert store()
    assert json.loads(path.read_text())["format"] == cache.FORMAT
    assert read() is not None


def test_every_truncation_is_survived() -> None:
    store()
    whole = cache.cache_path("cpu").read_bytes()
    for length in range(0, len(whole), 37):
        damage(whole[:length])
        with pytest.warns(CacheWarning):
            assert cache.tuned(example(), backends("eager", "onednn")) is None


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below a regular file cannot be written, not even by root."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(blocker / "cache"))
    cache.forget()
    with pytest.warns(CacheWarning, match="cannot be") as caught:
        assert [store(), store(k=64)] == [False, False]
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(set(messages)) <= 2  # one to say unreadable, one unwritable
    # the choice holds for this process
    assert cache.tuned(example(), backends("eager", "onednn")) is not None
    assert select(example()).backend.name == "onednn"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert read() is None  # and is gone after


def test_failing_write_keeps_what_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or read-only disk: the entries already there go on serving."""
    store(k=32)
    cache.forget()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left"):
        assert store(k=64) is False
    able = backends("eager", "onednn")
    assert cache.tuned(example(32), able) is not None
    assert cache.tuned(example(64), able) is not None
    left = [p.name for p in cache.cache_path("cpu").parent.iterdir()]
    assert not [name for name in left if name.startswith(".")]  # no temporary file stays


def test_lock_held_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    path = cache.cache_path("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.05)
    with FileLock(f"{path}.lock"), pytest.warns(CacheWarning, match="cannot be written"):
        assert store() is False


@pytest.mark.parametrize("what", ["source", "torch", "backend gone"])
def test_stale_entries_do_not_serve(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store()
    assert read() is not None
    if what == "source":
        monkeypatch.setattr(Backend, "source_hash", lambda self: "0" * 12)
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0.1")
    able = backends("eager") if what == "backend gone" else backends("eager", "onednn")
    assert cache.tuned(example(), able) is None


def decided(doubt: str = "") -> bool:
    times = {"eager": 2.0, "onednn": 1.0}
    best = "eager" if doubt else "onednn"
    return cache.store(example(), backends("eager", "onednn"), best, times, doubt)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_decision_in_doubt_replaces_none_that_is_not(on_disk: bool) -> None:
    able = backends("eager", "onednn")
    with contextlib.nullcontext() if on_disk else cache.in_memory():
        assert decided("a close rival") is on_disk
        assert decided("another rival") is on_disk  # one in doubt gives way to any other
        held = cache.tuned(example(), able)
        assert held is not None
        assert (held.best, held.doubt) == ("eager", "another rival")
        assert held.story().endswith("; in doubt: another rival; tune again when it is quiet")
        assert decided() is on_disk
        assert decided("a busy machine") is False
        held = cache.tuned(example(), able)
        assert held is not None
        assert (held.best, held.doubt) == ("onednn", "")
        assert "in doubt" not in held.story()
    if on_disk:
        assert read() == held


def test_a_decision_in_doubt_replaces_a_stale_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided()
    monkeypatch.setattr(Backend, "source_hash", lambda self: "0" * 12)
    assert decided("a close rival")
    entry = read()
    assert entry is not None
    assert entry.doubt == "a close rival"


def test_explanations_say_what_is_in_doubt() -> None:
    decided("a close rival")
    x, w, b = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16)
    assert "in doubt: a close rival" in str(fl.explain(x, w, b, activation="relu"))


def test_source_hash_covers_listed_sources() -> None:
    plain = Backend("f", "p", "n", "fastlinear.families.linear.reference:forward", lambda _: None)
    more = Backend("f", "p", "n", plain.target, plain.reason_not, ("families/linear/cpu",))
    assert plain.source_hash() != more.source_hash()
    assert len(plain.source_hash()) == 12


def test_hot_plans_are_dropped_when_the_cache_changes() -> None:
    x, w = torch.randn(8, 32), torch.randn(16, 32)
    fl.linear_act(x, w, activation="relu")
    for change in (store, lambda: cache.clear("cpu"), cache.forget):
        fl.linear_act(x, w, activation="relu")
        assert len(FRONT.plans) >= 1
        change()
        assert len(FRONT.plans) == 0


def test_a_tuned_choice_takes_effect_at_the_next_call() -> None:
    x, w, b = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16)
    untuned = fl.explain(x, w, b, activation="relu").choices[0]
    assert untuned.source == "predicted"
    store("onednn")
    choice = fl.explain(x, w, b, activation="relu").choices[0]
    assert (choice.backend.name, choice.source) == ("onednn", "tuned")
    assert cache.clear("cpu") == 1
    assert fl.explain(x, w, b, activation="relu").choices[0] == untuned


@pytest.mark.usefixtures("one_thread")
def test_many_writers_lose_nothing() -> None:
    processes = [writer(100 * i + 1, 12) for i in range(3)]
    assert [p.wait(timeout=120) for p in processes] == [0, 0, 0]
    for p in processes:
        assert p.stdout is not None
        p.stdout.close()
    cache.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cache.entries("cpu")) == 36


@pytest.mark.usefixtures("one_thread")
@pytest.mark.own_builds
def test_killed_writers_leave_a_whole_file() -> None:
    """kill -9 at random moments: the file always parses, keeps its entries, and can be written."""
    rng = random.Random(0)
    most = 0
    for round_ in range(4):
        process = writer(1000 * round_ + 1, 100_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.02, 0.25))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        cache.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            count = len(cache.entries("cpu"))
        assert count >= most
        most = count
    assert most > 0
    assert store(k=7)
    cache.forget()
    assert len(cache.entries("cpu")) == most + 1
    folder = cache.cache_path("cpu").parent
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".lock"]
