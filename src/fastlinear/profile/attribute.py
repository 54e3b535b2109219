"""Join profiler events to modules: a pure function from events to records.

A host op belongs to the innermost module range around it on its thread. An autograd node belongs
to the module of the forward op with its sequence number. A kernel belongs to the op that launched
it, found by correlation id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastlinear.profile.events import BACKWARD, EVALUATE, LOSS, MODULE, STEP, Event

PYTHON = "(python)"
ENGINE = "(autograd engine)"
_ACCUMULATE = EVALUATE + "torch::autograd::AccumulateGrad"
IN_LOSS = "(loss)"
LOSS_BACKWARD = "(loss, backward)"
_PHASES = {STEP: "(step)", LOSS: IN_LOSS, BACKWARD: ENGINE}


@dataclass(frozen=True)
class Owner:
    """To what a piece of time is charged. ``fqn`` is None outside every module; there
    ``direction`` is ``IN_LOSS`` or ``LOSS_BACKWARD`` for the loss function's own."""

    fqn: str | None
    direction: str
    op: str


@dataclass
class Times:
    """Nanoseconds and calls summed over all profiled steps."""

    calls: int = 0
    cpu_ns: int = 0
    device_ns: int = 0


@dataclass
class Attribution:
    """Times by owner, summed over the steps profiled, and the totals they should add up to.

    Attributes:
        times: owner → time.
        step_ns: host time inside the step ranges, without what lies between the ranges they
            hold: that is the measuring harness's own.
        waited_ns: the part of it spent waiting for autograd's own thread.
        kernels: (start_ns, end_ns) of every device event.
    """

    times: dict[Owner, Times] = field(default_factory=lambda: defaultdict(Times))
    step_ns: int = 0
    waited_ns: int = 0
    kernels: list[tuple[int, int]] = field(default_factory=list)

    def fraction(self, device: bool) -> float:
        """Share of the time charged to some module: of kernel time, or of the steps' host time.

        1.0 when there is no such time at all.
        """
        total = self.total_ns(device)
        inside = sum(
            t.device_ns if device else t.cpu_ns for o, t in self.times.items() if o.fqn is not None
        )
        return inside / total if total else 1.0

    def total_ns(self, device: bool) -> int:
        """All kernel time, or all host time of the steps."""
        if device:
            return sum(t.device_ns for t in self.times.values())
        return max(sum(t.cpu_ns for t in self.times.values()), self.step_ns - self.waited_ns)

    def busy_ns(self) -> int:
        """Time in which at least one kernel ran: the length of the union of their intervals."""
        busy, reached = 0, None
        for start, end in sorted(self.kernels):
            if reached is None or start > reached:
                busy += end - start
                reached = end
            elif end > reached:
                busy += end - reached
                reached = end
        return busy


@dataclass
class _Open:
    """An event whose end has not come yet, with what its children need to know."""

    event: Event
    owner: Owner
    counted: bool  # whether it opens a new record (a child of an op only adds time to it)
    covered_to: int  # up to where children have covered it
    inside_ns: int = 0  # time of its direct children


def attribute(events: Iterable[Event]) -> Attribution:
    """Charge every nanosecond inside the step ranges to an owner.

    Args:
        events: of any number of steps, in any order. Host events outside a step range on a thread
            that has one are ignored; other threads (autograd's) are taken whole.

    Self time of an op is its duration less its children's; it is summed under the outermost op of
    the module. Time of the backward range between two autograd nodes is charged to the later one's
    module, as ``"(autograd engine)"``: the engine is preparing it. Gradient accumulation belongs
    to the module whose node came just before it on that thread.
    """
    events = list(events)
    result = Attribution()
    walk = _Walk(result)
    ops = sorted((e for e in events if e.kind == "op"), key=lambda e: (e.start_ns, -e.end_ns))
    walk.step_threads = {e.thread for e in ops if e.name == STEP}
    for e in ops:
        walk.enter(e)
    walk.close_all()
    walk.charge_device([e for e in events if e.kind != "op"])
    return result


class _Walk:
    def __init__(self, result: Attribution) -> None:
        self.result = result
        self.step_threads: set[int] = set()
        self.stacks: dict[int, list[_Open]] = defaultdict(list)
        self.forward: dict[tuple[int, int], Owner] = {}  # (thread, sequence) → forward op's owner
        self.last_node: dict[int, Owner] = {}  # thread → owner of the latest autograd node
        self.by_id: dict[int, Owner] = {}
        self.spans: list[tuple[int, int, int, Owner]] = []  # start, end, thread, owner
        self.starts: list[int] = []  # of the spans, ascending as the events come sorted

    def enter(self, e: Event) -> None:
        stack = self.stacks[e.thread]
        while stack and stack[-1].event.end_ns <= e.start_ns:
            self.close(stack)
        parent = stack[-1] if stack else None
        if parent is None and e.thread in self.step_threads and e.name != STEP:
            return
        owner, counted = self.owner_of(e, parent)
        if not self.is_node(e) and e.sequence >= 0 and not e.name.startswith(MODULE):
            # Ops that make no node carry the number of the next one that does: the last one wins.
            self.forward[e.thread, e.sequence] = owner
        self.by_id[e.id] = owner
        self.spans.append((e.start_ns, e.end_ns, e.thread, owner))
        self.starts.append(e.start_ns)
        if parent is not None:
            if parent.event.name == BACKWARD and self.is_node(e):
                gap = max(0, e.start_ns - parent.covered_to)
                engine = Owner(owner.fqn, owner.direction, ENGINE)
                self.result.times[engine].cpu_ns += gap
                parent.inside_ns += gap
            parent.covered_to = max(parent.covered_to, e.end_ns)
            parent.inside_ns += e.ns
        stack.append(_Open(e, owner, counted, e.start_ns))

    def owner_of(self, e: Event, parent: _Open | None) -> tuple[Owner, bool]:
        around = parent.owner if parent else Owner(None, "other", PYTHON)
        if e.name in _PHASES:
            return Owner(None, IN_LOSS if e.name == LOSS else "other", _PHASES[e.name]), True
        if e.name.startswith(MODULE):
            direction = "backward" if around.direction == "backward" else "forward"
            return Owner(e.name[len(MODULE) :], direction, PYTHON), True
        if e.name.startswith(_ACCUMULATE):
            last = self.last_node.get(e.thread, Owner(None, "backward", ""))
            return Owner(last.fqn, "backward", "AccumulateGrad"), True
        if self.is_node(e):
            name = e.name.removeprefix(EVALUATE)
            if parent is not None and self.is_node(parent.event) and around.op == name:
                return around, False  # the node inside its own evaluate_function
            made_by = self.forward.get((e.forward_thread, e.sequence))
            of_loss = made_by is not None and made_by.direction == IN_LOSS
            direction = LOSS_BACKWARD if of_loss else "backward"
            owner = Owner(made_by.fqn if made_by else None, direction, name)
            self.last_node[e.thread] = owner
            return owner, True
        if around.op == PYTHON or around.op in _PHASES.values():
            return Owner(around.fqn, around.direction, e.name), True
        return around, False

    @staticmethod
    def is_node(e: Event) -> bool:
        return e.name.startswith(EVALUATE) or (e.sequence >= 0 and e.forward_thread > 0)

    def close(self, stack: list[_Open]) -> None:
        top = stack.pop()
        own = max(0, top.event.ns - top.inside_ns)
        if top.event.name == STEP:
            self.result.step_ns += top.event.ns - own
            return
        times = self.result.times[top.owner]
        times.calls += top.counted
        if top.event.name == BACKWARD and top.inside_ns == 0:
            own = 0  # the nodes ran on another thread: this one only waited
            self.result.waited_ns += top.event.ns
        times.cpu_ns += own

    def close_all(self) -> None:
        for stack in self.stacks.values():
            while stack:
                self.close(stack)

    def charge_device(self, events: list[Event]) -> None:
        launches = {e.id: e for e in events if e.kind == "runtime" and e.id > 0}
        for e in events:
            if e.kind != "device":
                continue
            self.result.kernels.append((e.start_ns, e.end_ns))
            launch = launches.get(e.id)
            owner = self.by_id.get(e.link) if e.link > 0 else None
            if owner is None and launch is not None:
                owner = self.by_id.get(launch.link) if launch.link > 0 else None
                owner = owner or self.innermost(launch)
            if owner is None:
                owner = Owner(None, "other", e.name)
            elif owner.op == PYTHON or owner.op in _PHASES.values():
                # Launched straight from Python (a Triton kernel, say): name it by the kernel.
                owner = Owner(owner.fqn, owner.direction, e.name)
                self.result.times[owner].calls += 1
            self.result.times[owner].device_ns += e.ns

    def innermost(self, launch: Event) -> Owner | None:
        """The latest op open at the launch; on the launch's own thread where that is known."""
        fallback = None
        for i in range(bisect_right(self.starts, launch.start_ns) - 1, -1, -1):
            _, end, thread, owner = self.spans[i]
            if launch.start_ns < end:
                if thread == launch.thread:
                    return owner
                fallback = fallback or owner
        return fallback
