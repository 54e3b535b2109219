"""Batch-invariant calls: the bits of a row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastlinear as fl
from fastlinear.calibration import ways
from fastlinear.core import settings
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch import cache, first_use
from fastlinear.dispatch.backend import families
from fastlinear.families.linear import spec as linear_spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
ROWS = 700
SOME = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 300, 513)
WIDTHS = ((64, 64), (33, 7), (1, 1), (2048, 3), (300, 260))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    settings.allow_batches(None)
    cache.changed()


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)


def depends_on_rows(call: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """Which rows of x (rows first) come out otherwise beside fewer or other rows."""
    whole = call(x)
    found = [
        f"the first {m}, call {turn}"
        for m in SOME
        for turn in range(3)  # a kind of call is recorded when it comes again
        if not torch.equal(call(x[:m].clone()), whole[:m])
    ]
    for name, part in (("a view", x[7:50]), ("a copy", x[7:50].clone())):
        if not torch.equal(call(part), whole[7:50]):
            found.append(name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)
    if not torch.equal(call(x[order]), whole[order]):
        found.append("another order")
    return found


def calls(draw: Callable[..., Tensor], device: str, dtype: torch.dtype) -> Iterator[Any]:
    """(name, a call of rows, the rows)."""

    def t(*shape: int, scale: float = 1.0) -> Tensor:
        return (draw(*shape) * scale).to(device, dtype)

    for k, n in WIDTHS:
        x, w, b = t(ROWS, k), t(n, k, scale=k**-0.5), t(n)
        for act in ("none", "gelu", "tanh", "silu"):
            yield (
                f"linear_act {k} {n} {act}",
                lambda x, w=w, b=b, act=act: fl.linear_act(x, w, b, activation=act),
                x,
            )
        turned = w.t().contiguous().t()
        yield f"linear_act {k} {n} turned", lambda x, w=turned: fl.linear_act(x, w), x
    w, b = t(333), t(333)
    yield (
        "diagonal_linear turned",
        lambda x: fl.diagonal_linear(x.t().contiguous().t(), w),
        t(ROWS, 333),
    )
    for act in ("none", "gelu", "mish"):
        yield (
            f"diagonal_linear {act}",
            lambda x, act=act, w=w, b=b: fl.diagonal_linear(x, w, b, activation=act),
            t(ROWS, 333),
        )
    ws, bs = [t(64, 40), t(32, 64), t(3, 32)], [t(64), None, t(3)]
    yield "mlp", lambda x: fl.mlp(x, ws, bs, activation="silu"), t(ROWS, 40)
    gate, up, down = t(130, 100), t(130, 100), t(50, 130, scale=0.1)
    yield (
        "gated_mlp",
        lambda x: fl.gated_mlp(x, gate, up, down, activation="gelu_tanh"),
        t(ROWS, 100),
    )
    yield "gated_linear", lambda x: fl.gated_linear(x, gate, up), t(ROWS, 100)
    for groups, k, n in ((4, 64, 64), (3, 100, 7), (5, 260, 17)):
        w, b = t(groups, n, k, scale=k**-0.5), t(groups, n)
        yield (
            f"grouped_linear {groups} {k} {n}",
            lambda x, w=w, b=b: fl.grouped_linear(x, w, b, activation="gelu"),
            t(ROWS, groups * k),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_depend_on_each_other(
    draw: Callable[..., Tensor], device: str, dtype: torch.dtype
) -> None:
    fl.batch_invariant()
    with torch.no_grad():
        failed = {
            name: found
            for name, call, x in calls(draw, device, dtype)
            if (found := depends_on_rows(call, x))
        }
    assert failed == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_groups_do_not_depend_on_each_other(
    draw: Callable[..., Tensor], device: str, dtype: torch.dtype
) -> None:
    fl.batch_invariant()
    w, b, x = (t.to(device, dtype) for t in (draw(4, 20, 72), draw(4, 20), draw(900, 72)))
    sizes = torch.tensor([100, 300, 0, 500], device=device)
    whole = fl.ragged_linear(x, w, sizes, b, activation="gelu")
    for a, c in ((3, 50), (1, 17), (64, 129)):
        few = torch.tensor([a, 0, 0, c], device=device)
        y = fl.ragged_linear(torch.cat([x[:a], x[400 : 400 + c]]), w, few, b, activation="gelu")
        assert torch.equal(y, torch.cat([whole[:a], whole[400 : 400 + c]]))

    ws = [draw(20, 72).to(device, dtype), draw(5, 33).to(device, dtype)]
    xs = [draw(500, 72).to(device, dtype), draw(900, 33).to(device, dtype)]
    lists = fl.unequal_linear(xs, ws, activation="gelu")
    for a, c in ((3, 80), (1, 1), (129, 17)):
        parts = fl.unequal_linear([xs[0][:a], xs[1][5 : 5 + c]], ws, activation="gelu")
        assert torch.equal(parts[0], lists[0][:a])
        assert torch.equal(parts[1], lists[1][5 : 5 + c])


@pytest.mark.parametrize("device", DEVICES)
def test_training_computes_the_same_rows(draw: Callable[..., Tensor], device: str) -> None:
    """With gradients, the results of the same call without; and gradients are there."""
    fl.batch_invariant()
    for name, call, x in calls(draw, device, torch.float32):
        with torch.no_grad():
            expected = call(x)
        given = x.clone().requires_grad_()
        y = call(given)
        assert torch.equal(y, expected), name
        y.sum().backward()
        assert given.grad is not None, name


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_takes_it_too(draw: Callable[..., Tensor], device: str) -> None:
    x, w, b = (t.to(device) for t in (draw(300, 96), draw(40, 96), draw(40)))

    def layer(x: Tensor) -> Tensor:
        return fl.linear_act(x, w, b, activation="gelu", backend=BATCH_INVARIANT)

    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
        assert torch.equal(compiled(x[:3]), layer(x)[:3])


def test_it_is_taken_only_where_asked_for() -> None:
    for fam in families().values():
        for piece in fam.pieces:
            assert BATCH_INVARIANT not in {b.name for b in fam.candidates(piece)}
        assert BATCH_INVARIANT in {b.name for b in fam.candidates("forward", on_request=True)}


def test_a_backend_that_is_named_comes_before_the_setting(draw: Callable[..., Tensor]) -> None:
    fl.batch_invariant()
    x, w = draw(5, 64), draw(64, 64)
    told = fl.explain(x, w)
    assert "batch_invariant" in str(told)
    named = fl.linear_act(x, w, backend="eager")
    assert torch.equal(named, torch.nn.functional.linear(x, w))
    fl.batch_invariant(False)
    assert "batch_invariant" not in str(fl.explain(x, w))


def test_modules_take_it_by_name(draw: Callable[..., Tensor]) -> None:
    layer = fl.nn.Linear(64, 32, activation="gelu", backend=BATCH_INVARIANT)
    x = draw(100, 64)
    with torch.no_grad():
        assert torch.equal(layer(x)[:1], layer(x[:1]))


def test_the_environment_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.allow_batches(None)
    monkeypatch.setenv("FASTLINEAR_BATCH_INVARIANT", "1")
    assert settings.batch_invariant()
    settings.allow_batches(None)
    monkeypatch.setenv("FASTLINEAR_BATCH_INVARIANT", "yes")
    with pytest.raises(InputError, match="expected 1 or 0"):
        settings.batch_invariant()


def test_what_cannot_be_had_is_refused(draw: Callable[..., Tensor]) -> None:
    """Never silently by something else, and with a remedy that works."""
    x, w = draw(5, 8), draw(4, 8)
    with pytest.raises(InputError, match="batch_invariant: expected enabled"):
        fl.batch_invariant(1)  # type: ignore[arg-type]
    fl.batch_invariant()
    refused = partial(pytest.raises, UnsupportedError, match=r"batch_invariant\(False\)")
    with refused():
        fl.linear_act(x.double(), w.double())
    with refused():
        torch.func.vmap(lambda row: fl.linear_act(row, w))(x)
    with refused():
        torch.func.jvp(lambda x: fl.linear_act(x, w), (x,), (x,))
    with refused():
        fl.linear_act(draw(5, 0), draw(4, 0), draw(4), activation="silu")
    with refused():
        fl.mlp(draw(5, 3), [draw(0, 3), draw(2, 0)], [draw(0), draw(2)])
    with refused():
        make_fx(lambda x: fl.linear_act(x, w))(x)
    assert fl.linear_act(draw(0, 8), w).shape == (0, 4)
    double = draw(3, 8, 8).double()
    with pytest.raises(UnsupportedError, match="grouped_linear"):
        fl.grouped_linear(draw(5, 8).double(), double, layout="... k")


def test_plans_made_before_are_made_anew(draw: Callable[..., Tensor]) -> None:
    """As often as the setting changes, in plain calls and in compiled ones."""
    x, w, b = draw(300, 257), draw(64, 257), draw(64)
    compiled = torch.compile(lambda x: fl.linear_act(x, w, b), backend="eager")
    with torch.no_grad():
        named = fl.linear_act(x, w, b, backend=BATCH_INVARIANT)
        own = torch.nn.functional.linear(x, w, b)
        assert not torch.equal(named, own)
        for enabled in (False, True, False, True):
            fl.batch_invariant(enabled)
            for call in (lambda x: fl.linear_act(x, w, b, activation="none"), compiled):
                for m in (1, 3, 300):
                    assert torch.equal(call(x[:m]), named[:m]) or not enabled
            told = fl.explain(x, w, b).choices[0].backend.name
            assert (told == BATCH_INVARIANT) == enabled


def test_a_choice_begun_before_the_setting_changed_is_not_kept(
    draw: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another thread changes it while this one compiles or measures."""
    x, w = draw(300, 257), draw(64, 257)
    resolve = linear_spec.FRONT._resolved

    def slow(*call: Any) -> Any:
        found = resolve(*call)
        fl.batch_invariant()
        return found

    with torch.no_grad():
        monkeypatch.setattr(linear_spec.FRONT, "_resolved", slow)
        fl.linear_act(x, w)
        monkeypatch.undo()
        expected = fl.linear_act(x, w, backend=BATCH_INVARIANT)
        for _ in range(4):
            assert torch.equal(fl.linear_act(x, w), expected)


@pytest.mark.parametrize("named", [False, True])
def test_modules_compute_every_product_so(draw: Callable[..., Tensor], named: bool) -> None:
    """Also behind a dropout or in another dtype; layers with hooks are refused."""
    backend = BATCH_INVARIANT if named else None
    x = draw(300, 257)

    def made(**how: Any) -> fl.nn.GatedMLP:
        return fl.nn.GatedMLP(257, 130, backend=backend, **how)

    if not named:
        fl.batch_invariant()
    plain, dropping, mixed = made(), made(dropout=1e-9), made().bfloat16()
    mixed.down_proj.float()
    with torch.no_grad():
        assert depends_on_rows(plain, x) == []
        assert depends_on_rows(dropping, x) == []
        assert depends_on_rows(mixed, x.bfloat16()) == []
    plain.gate_proj.register_forward_hook(lambda *_: None)
    chain = fl.nn.MLP([257, 130, 50], activation="silu", backend=backend)
    next(iter(chain.children())).register_forward_hook(lambda *_: None)
    for hooked in (plain, chain):
        with pytest.raises(UnsupportedError, match="hooks"):
            hooked(x)


def test_threads_change_nothing(draw: Callable[..., Tensor]) -> None:
    x, w, b = draw(999, 257), draw(130, 257), draw(130)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(fl.linear_act(x, w, b, activation="gelu", backend=BATCH_INVARIANT))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sizes_of_ragged_rows_are_read_at_every_call(draw: Callable[..., Tensor]) -> None:
    """And those of the forward hold for its backward."""
    x, w = draw(9, 6), draw(2, 4, 6)
    for a in (4, 2, 7, 5, 3):
        sizes = torch.tensor([a, 9 - a])
        y = fl.ragged_linear(x, w, sizes, backend=BATCH_INVARIANT)
        expected = torch.cat([x[:a] @ w[0].t(), x[a:] @ w[1].t()])
        torch.testing.assert_close(y, expected)
    given, sizes = x.clone().requires_grad_(), torch.tensor([4, 5])
    y = fl.ragged_linear(given, w, sizes, backend=BATCH_INVARIANT)
    sizes[0] = 1
    y.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad[:4], w[0].sum(0).expand(4, 6))


def test_compiled_lists_take_it_too(draw: Callable[..., Tensor]) -> None:
    xs, ws = [draw(300, 257), draw(40, 33)], [draw(64, 257), draw(8, 33)]
    fl.batch_invariant()

    def groups(xs: list[Tensor]) -> list[Tensor]:
        return fl.unequal_linear(xs, ws)

    compiled = torch.compile(groups, backend="eager")
    with torch.no_grad():
        for mine, plain in zip(compiled(xs), groups(xs), strict=True):
            assert torch.equal(mine, plain)
        assert torch.equal(compiled([xs[0][:3], xs[1]])[0], groups(xs)[0][:3])


def test_nothing_is_measured_for_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    fl.batch_invariant()
    monkeypatch.setattr(first_use, "tune", lambda *_, **__: pytest.fail("no choice is to be made"))
    fl.tune_at_first_use(seconds=5.0)
    try:
        fl.linear_act(torch.randn(7, 19), torch.randn(5, 19))
    finally:
        fl.tune_at_first_use(False)
    with pytest.raises(InputError, match="measuring choices"):
        ways.wait()
    with pytest.raises(InputError, match="optimize_"):
        fl.optimize_(torch.nn.Linear(3, 3), torch.randn(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1024, 1024), (4096, 512), (264, 2048)])
def test_all_tiles_of_a_gpu_add_up_in_one_order(dtype: torch.dtype, k: int, n: int) -> None:
    """From few rows to as many as persistent programs take."""
    x = torch.randn(16384, k, device="cuda").to(dtype)
    w = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    for weight in (w, w.t().contiguous().t()):
        whole = fl.linear_act(x, weight, activation="gelu", backend=BATCH_INVARIANT)
        for m in (1, 2, 16, 17, 33, 64, 65, 128, 257, 640, 1111, 2048, 4096, 9000):
            part = fl.linear_act(x[:m], weight, activation="gelu", backend=BATCH_INVARIANT)
            assert torch.equal(part, whole[:m]), m
