"""Terms on which contenders compute: what they ask for, or give up, beyond a call of fastlinear.

A peer is the one to beat where it computes on the same terms. Some terms fastlinear can be had on
as well, in a form of its own which answers for it: tensors laid out in other ways, a model compiled
around it, a call recorded as a CUDA graph. Others it never takes: tensors laid out before the clock
starts, a packed weight that nobody looks at again, NaN turned into 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.peer import OURS

REPLAYED = "the same memory at every call"
STACKED = "gate and up stacked in one weight"
GROUPS_FIRST = "x and y hold a group's rows together"
CHANNELS_FIRST = "x and y hold a channel's positions together"
SEQUENCES = "x and y are several sequences of channels"
COMPILED = "the whole model compiled"
INTO = "results in memory of the caller's"
LAYOUTS = frozenset({STACKED, GROUPS_FIRST, CHANNELS_FIRST, SEQUENCES})
FORMS = LAYOUTS | {REPLAYED, COMPILED, INTO}
"""Terms on which there are forms of fastlinear; on all others there are none."""
NAN_LOST = "relu turns NaN into 0"
PACKED = "weights are taken to be as they were packed"
UNCHECKED = "sizes and parameters are taken to be as they were recorded"
LAID_OUT = "tensors are laid out, by sizes known to the host, before the clock starts"
BY_HAND = "gradients by hand, without autograd"

_PREPARED: dict[str, tuple[str, ...]] = {
    "ragged": ("padded_bmm", "eager_parts"),
    "unequal": ("padded_bmm", "block_diagonal"),
}
_PREPARED_ON_GPUS = {"ragged": ("eager", "compile")}  # there the sizes are on the device
_REPLAYS = (
    "hand_loop",
    "cuda_graph",
    "graphed_callable",
    "make_graphed_callables",
    f"{OURS}_reusing",
)
_BY_LAYOUT: dict[str, tuple[str, ...]] = {
    GROUPS_FIRST: ("bmm", "baddbmm", "grouped_mm", "compile_bmm", f"{OURS}_groups"),
    CHANNELS_FIRST: ("conv1d", "multichannel", f"{OURS}_channels"),
    SEQUENCES: ("conv1d_sequences", f"{OURS}_sequences"),
}
_COMPILED = ("compile", "reduce_overhead", "_asked")


def terms(contender: str, case: Mapping[str, Any]) -> frozenset[str]:
    """The terms of a contender in a case (``Case.to_json``, of which any part may be missing)."""
    experiment = case.get("experiment", "")
    relu = case.get("options", {}).get("activation") == "relu"
    prepared = _PREPARED.get(experiment, ())
    if case.get("device") == "cuda":
        prepared += _PREPARED_ON_GPUS.get(experiment, ())
    model = experiment == "models"
    modes = ("reduce_overhead", *(("max_autotune",) if case.get("device") == "cuda" else ()))
    met = {
        REPLAYED: contender in _REPLAYS
        or contender.endswith("_cuda_graph")
        or (model and contender.endswith(modes)),
        STACKED: experiment == "gated-mlp" and ("_stacked" in contender or "quack" in contender),
        GROUPS_FIRST: experiment == "groups" and contender in _BY_LAYOUT[GROUPS_FIRST],
        CHANNELS_FIRST: experiment == "groups" and contender in _BY_LAYOUT[CHANNELS_FIRST],
        SEQUENCES: experiment == "groups" and contender in _BY_LAYOUT[SEQUENCES],
        INTO: contender in ("addcmul_out", f"{OURS}_out"),
        COMPILED: model and any(part in contender for part in _COMPILED),
        NAN_LOST: relu and contender.startswith(("cublaslt", "onednn")),
        PACKED: contender == "onednn_prepacked",
        UNCHECKED: contender in ("graphed_callable", "make_graphed_callables"),
        LAID_OUT: contender in prepared,
        BY_HAND: contender == "hand_loop" and case.get("direction", "forward") != "forward",
    }
    return frozenset(term for term, holds in met.items() if holds)


def held(own: frozenset[str], peer: frozenset[str]) -> bool:
    """Whether a contender on terms ``own`` is held against one on terms ``peer``: where that asks
    for no more, and has its tensors laid out alike."""
    return peer <= own and peer & LAYOUTS == own & LAYOUTS


def answers(own: str, peer: str, case: Mapping[str, Any]) -> bool:
    """``held`` of two contenders in a case."""
    return held(terms(own, case), terms(peer, case))
