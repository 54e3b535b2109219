"""Linears that share one call inside their module's: right answers whatever that module does."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastlinear.rewrite.rules.grouped.shared.forward import listed, together
from fastlinear.rewrite.swap import shared_calls
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.swap.shared_calls import Group, caller_forward, shared_linear

NAMES = ("q", "k", "v")


class Attention(nn.Module):
    """Calls its three linears; ``between`` is what happens before the second."""

    def __init__(self, between: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
        h = x * 1.0
        q = self.q(h)
        if self.between is not None:
            self.between(self, h)
        given = h if other is None else other
        return torch.cat([q, self.k(given), self.v(given)], -1)


class Counts:
    """How often results were computed for others, and taken."""

    def __init__(self) -> None:
        self.first = self.taken = 0

    def __call__(self) -> tuple[int, int]:
        """Both, from here on anew."""
        found = self.first, self.taken
        self.first = self.taken = 0
        return found


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    made = Counts()
    first, taken = shared_calls._Call._first, shared_calls._Call._taken

    def counted_first(*given: Any) -> Any:
        y = first(*given)
        made.first += y is not None
        return y

    def counted_taken(*given: Any) -> Any:
        y = taken(*given)
        made.taken += y is not None
        return y

    monkeypatch.setattr(shared_calls._Call, "_first", counted_first)
    monkeypatch.setattr(shared_calls._Call, "_taken", counted_taken)
    return made


def rewritten(
    model: nn.Module, compute: Any = together, unwritten: bool = True, home: str = ""
) -> tuple[nn.Module, nn.Module]:
    """A model with its linears sharing a call, and the same as it was."""
    plain = copy.deepcopy(model)
    parent = model.get_submodule(home)
    swaps = [Swap(n, parent.get_submodule(n), shared_linear(nn.Linear(1, 1))) for n in NAMES]
    swaps.append(Swap("", parent, caller_forward(parent, (Group(NAMES, compute, unwritten),))))
    SwapSet(swaps).on()
    return model, plain


def same(ours: Any, theirs: Any, *args: Tensor, **kwargs: Tensor) -> None:
    """Assert that outputs and all gradients agree, those that are None as well."""
    found = []
    for model in (ours, theirs):
        model.zero_grad()
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        y = model(*given, **kwargs)
        if y.requires_grad:
            y.square().sum().backward()
        found.append([y, *(x.grad for x in given), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def x_of(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


@pytest.mark.parametrize("compute", [together, listed])
@pytest.mark.parametrize("grad", [False, True])
def test_the_first_computes_for_all(compute: Any, grad: bool, counts: Counts) -> None:
    model, plain = rewritten(Attention(), compute)
    same(model, plain, x_of(2, 3, 8, grad=grad))
    assert counts() == (1, 2)
    with torch.no_grad():
        same(model, plain, x_of(5, 8))
    assert counts() == (1, 2)
    same(model, plain, x_of(3, 8), other=x_of(6, 8)[3:])  # the second and third read another
    assert counts() == (1, 0)


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "the input": lambda _, h: h.add_(1.0),
    "a weight": lambda m, _: m.k.weight.mul_(2.0),
    "a bias": lambda m, _: m.v.bias.add_(1.0),
    "another weight": lambda m, _: setattr(m.k, "weight", nn.Parameter(m.k.weight * 2)),
    "another layer": lambda m, _: setattr(m, "k", nn.Linear(8, 4).requires_grad_(False)),
    "a hook": lambda m, _: m.k.register_forward_hook(lambda _, __, y: y * 3),
    "its forward": lambda m, _: setattr(
        m.k, "forward", MethodType(lambda s, x: nn.Linear.forward(s, x) * 3, m.k)
    ),
    "its class": lambda m, _: setattr(m.k, "__class__", Tripled),
}


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


@pytest.mark.parametrize("what", WRITES)
def test_what_is_changed_between_two_calls_counts(what: str) -> None:
    def between(module: Any, h: Tensor) -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            WRITES[what](module, h)

    model, plain = rewritten(Attention(between))
    for _ in range(3):  # in the first call it is between, from then on it was before
        with torch.no_grad():
            torch.testing.assert_close(model(x_of(2, 8)), plain(x_of(2, 8)))


@contextmanager
def _hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved tensors' hooks": _hooks,
}


@pytest.mark.parametrize("mode", MODES)
def test_another_state_of_pytorch_between_two_calls_counts(mode: str, counts: Counts) -> None:
    class Within(Attention):
        def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
            q = self.q(x)
            with MODES[mode]():
                k = self.k(x)
            return torch.cat([q, k.to(q.dtype), self.v(x)], -1)

    model, plain = rewritten(Within())
    same(model, plain, x_of(3, 8, grad=True))
    assert counts() == (1, 1)  # the third is in the first one's state again
    with MODES[mode]():
        same(model, plain, x_of(3, 8))
    assert counts.first == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_and_inside(reentrant: bool, counts: Counts) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return y

    model, plain = rewritten(Around(), home="inner")
    same(model, plain, x_of(3, 8, grad=True))
    assert counts()[0] == (2 if reentrant else 1)  # the other kind stops as soon as it can

    class Inside(Attention):
        def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
            q = checkpoint(self.q, x, use_reentrant=reentrant)
            return torch.cat([q, self.k(x), checkpoint(self.v, x, use_reentrant=reentrant)], -1)

    model, plain = rewritten(Inside())
    same(model, plain, x_of(3, 8, grad=True))


def test_results_that_are_not_taken_leave_no_gradients() -> None:
    """Gradients of a layer that was not called, or whose result was not used, are None."""

    class Some(Attention):
        def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
            q = self.q(x)
            if other is None:
                return q
            self.k(x)
            return q.sum() + self.v(x)

    for compute in (together, listed):
        model, plain = rewritten(Some(), compute)
        same(model, plain, x_of(3, 8, grad=True))
        same(model, plain, x_of(3, 8), other=x_of(1))


@pytest.mark.parametrize("compute", [together, listed])
def test_several_backwards_and_second_derivatives(compute: Any) -> None:
    found = []
    for model in rewritten(Attention(), compute):
        x, params = x_of(3, 8, grad=True), list(model.parameters())
        q, k, v = model(x).split((8, 4, 4), -1)
        grads = []
        for y in (q, k + v, q * v.sum(), v):  # each reads other results
            model.zero_grad()
            y.square().sum().backward(retain_graph=True)
            grads += [p.grad for p in params]
        (dx,) = torch.autograd.grad((q * v.sum() + k.sum()).square().sum(), x, create_graph=True)
        model.zero_grad()
        dx.square().sum().backward()
        found.append([*grads, x.grad, *(p.grad for p in params)])
    for a, b in zip(*found, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compute", [together, listed])
def test_training_under_autocast(compute: Any, counts: Counts) -> None:
    found = []
    for model in rewritten(Attention(), compute):
        x = x_of(3, 8, grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert counts() == (1, 2)


def test_another_stream_counts(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter(range(100))
    monkeypatch.setattr(shared_calls, "_stream_of", lambda _: next(streams))
    model, plain = rewritten(Attention())
    same(model, plain, x_of(3, 8))
    assert counts() == (1, 0)


def test_layers_that_are_frozen() -> None:
    model = Attention()
    model.k.requires_grad_(False)
    model.v.bias.requires_grad_(False)
    model, plain = rewritten(model)
    same(model, plain, x_of(3, 8))
    same(model, plain, x_of(3, 8, grad=True))


@pytest.mark.parametrize("compute", [together, listed])
def test_inference_mode(compute: Any, counts: Counts) -> None:
    """Its tensors count no writes: they are shared where the code shows that nothing writes."""
    for unwritten in (True, False):
        model, plain = rewritten(Attention(), compute, unwritten)
        with torch.inference_mode():
            torch.testing.assert_close(model(x_of(3, 8)), plain(x_of(3, 8)))
        assert counts() == ((1, 2) if unwritten else (0, 0))
    with torch.inference_mode():
        x = x_of(3, 8)
        model, plain = rewritten(Attention(), compute, unwritten=False)
    with torch.no_grad():
        for given in (x, x_of(3, 8)):  # weights of inference mode count no writes either
            torch.testing.assert_close(model(given), plain(given))
    assert counts() == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_with_hooks_is_called_by_itself(name: str, counts: Counts) -> None:
    model, plain = rewritten(Attention())
    for m in (model, plain):
        m.get_submodule(name).register_forward_hook(lambda _, __, y: y * 3)
    same(model, plain, x_of(3, 8))
    assert counts() == (0, 0)


def test_nothing_is_kept_after_a_call() -> None:
    class Breaking(Attention):
        def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
            h = x * 1.0
            seen.append(weakref.ref(h))
            q = self.q(h)
            seen.append(weakref.ref(shared_calls._under_way.call.left[0].ys[1]))  # type: ignore
            del h
            raise ValueError(str(q.shape))

    seen: list[Any] = []
    model, _ = rewritten(Breaking())
    with torch.no_grad(), pytest.raises(ValueError) as raised:
        model(x_of(3, 8))
    gc.collect()
    assert [r() for r in seen] == [None, None]
    assert shared_calls._under_way.call is None
    del raised
    model, plain = rewritten(Attention())
    same(model, plain, x_of(3, 8))
    assert shared_calls._under_way.call is None


def test_a_module_that_calls_itself(counts: Counts) -> None:
    class Again(Attention):
        def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
            q = self.q(x)
            if other is not None:
                q = q + self(x)[..., :8]
            return torch.cat([q, self.k(x), self.v(x)], -1)

    model, plain = rewritten(Again())
    same(model, plain, x_of(3, 8), other=x_of(1))
    assert counts() == (2, 4)


def test_threads_share_nothing(counts: Counts) -> None:
    wait = threading.Barrier(4)
    model, plain = rewritten(Attention(lambda *_: wait.wait(30)))
    plain.between = None
    xs = [torch.full((2, 8), float(i)) for i in range(4)]
    found: dict[int, Tensor] = {}

    def run(i: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                found[i] = model(xs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, x in enumerate(xs):
        torch.testing.assert_close(found[i], plain(x))
    assert counts() == (20, 40)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_as_one_graph(grad: bool, counts: Counts) -> None:
    model, plain = rewritten(Attention())
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with nullcontext() if grad else torch.no_grad():
        for rows in (3, 4, 5):
            torch.testing.assert_close(compiled(x_of(rows, 8)), plain(x_of(rows, 8)))
    assert counts() == (0, 0)
    same(model, plain, x_of(3, 8))
    assert counts() == (1, 2)
    model.k.compile(backend="eager")
    same(model, plain, x_of(3, 8))
    assert counts() == (0, 0)


def test_transforms_and_modes_see_each_linear(counts: Counts) -> None:
    model, plain = rewritten(Attention())
    xs = x_of(5, 3, 8)
    torch.testing.assert_close(torch.vmap(model)(xs), torch.vmap(plain)(xs))
    for f in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(f(model)(xs[0]), f(plain)(xs[0]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(xs[0], xs[1])
        found, expected = (
            torch.autograd.forward_ad.unpack_dual(m(dual))[1] for m in (model, plain)
        )
        torch.testing.assert_close(found, expected)
    from torch.utils.flop_counter import FlopCounterMode

    flops = []
    for m in (model, plain):
        with FlopCounterMode(display=False) as counter:
            m(xs)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0
    assert counts() == (0, 0)


def test_copies_share_calls_of_their_own(counts: Counts) -> None:
    model, plain = rewritten(Attention())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    same(twin, plain, x_of(3, 8))
    assert counts() == (1, 2)
    alone = copy.deepcopy(twin.q)  # type: ignore[arg-type]
    torch.testing.assert_close(alone(x_of(3, 8)), plain.q(x_of(3, 8)))  # type: ignore[operator]
    assert counts() == (0, 0)


def test_wrong_inputs_raise_as_before() -> None:
    model, plain = rewritten(Attention())
    for x in (x_of(3, 7), x_of(3, 8).double()):
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            model(x)
        assert str(found.value) == str(expected.value)
