"""fl.graphed against the callable itself: on the CPU with a tape that acts as CUDA graphs do, on a
GPU with real ones."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.graph_tape import Tape, TapeRecorder
from fastlinear.nn import graphed as module_of_graphed
from fastlinear.nn.graphed import Graphed, graphed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(module_of_graphed, "CudaRecorder", TapeRecorder)
    return str(request.param)


def mlp(device: str, *, middle: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 3)).to(device)


def counts(g: Graphed) -> tuple[int, int, int]:
    return g.counts.recorded, g.counts.replayed, g.counts.plain


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    run(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# ------------------------------------------------------------------------------------ inference


@torch.no_grad()
def test_every_batch_size_through_few_graphs(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    for rows in (3, 4, 1, 2, 7, 8, 5, 3):
        x = torch.randn(rows, 4, device=device)
        y = g(x)
        assert y.shape == (rows, 3)
        assert_close(y, model(x))
    assert counts(g) == (4, 8, 0)  # buckets 4, 1, 2, 8


@torch.no_grad()
def test_rows_beyond_the_largest_bucket_and_no_rows_run_plainly(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0, batch_buckets=[4, 2])
    for rows in (0, 5):
        x = torch.randn(rows, 4, device=device)
        assert_close(g(x), model(x))
    assert counts(g) == (0, 0, 2)
    assert g(torch.randn(3, 4, device=device)).shape == (3, 3)
    assert counts(g) == (1, 1, 2)


@torch.no_grad()
def test_outputs_are_the_callers_own(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    y1 = g(x1)
    kept = y1.clone()
    y2 = g(x2)
    assert torch.equal(y1, kept)
    assert not torch.equal(y1, y2)
    y2.zero_()
    assert_close(g(x1), kept)


@torch.no_grad()
def test_weights_edited_in_place_replaced_or_loaded_are_seen(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    x = torch.randn(4, 4, device=device)
    g(x)
    model[0].weight.mul_(2)
    assert_close(g(x), model(x))
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert_close(g(x), model(x))
    assert g.counts.recorded == 1
    model[0].weight = nn.Parameter(torch.randn(8, 4, device=device))
    assert_close(g(x), model(x))
    model[2].weight.data = torch.randn(3, 8, device=device)
    assert_close(g(x), model(x))
    model[1] = nn.GELU()
    assert_close(g(x), model(x))
    assert g.counts.recorded == 4


@torch.no_grad()
def test_a_view_of_the_same_memory_is_another_weight(device: str) -> None:
    layer = nn.Linear(4, 4, bias=False, device=device)
    g = graphed(layer)
    x = torch.randn(2, 4, device=device)
    g(x)
    layer.weight.data = layer.weight.data.t()
    assert_close(g(x), layer(x))


@torch.no_grad()
def test_modes_have_graphs_of_their_own(device: str) -> None:
    model = mlp(device, middle=lambda: nn.Dropout(0.9))
    g = graphed(model)
    x = torch.randn(64, 4, device=device)
    torch.manual_seed(3)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(3)
    for y in expected:  # random numbers go on from call to call
        assert_close(g(x), y)
    model.eval()
    assert_close(g(x), model(x))
    model.train()
    g(x)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_random_callables_are_recorded_at_exact_sizes(device: str) -> None:
    g = graphed(nn.Dropout(0.5), batch_dim=0)
    for rows in (3, 4, 3):
        assert g(torch.ones(rows, 4, device=device)).shape == (rows, 4)
    assert counts(g) == (2, 3, 0)


@torch.no_grad()
def test_a_generator_of_the_callers_goes_on(device: str) -> None:
    generator = torch.Generator(device)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    x = torch.zeros(4, 4, device=device)
    generator.manual_seed(5)
    expected = [noisy(x) for _ in range(3)]
    generator.manual_seed(5)
    g = graphed(noisy)
    for y in expected:
        assert_close(g(x), y)


@torch.no_grad()
def test_autocast_is_part_of_the_key(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)
    assert g(x).dtype == torch.float32
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert_close(g(x), model(x))
            model[0].weight.mul_(1.5)  # inside one context torch itself keeps the old cast
        with torch.autocast(device, dtype=torch.bfloat16):
            y, expected = g(x), model(x)
        assert y.dtype == torch.bfloat16
        assert_close(y, expected)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_structures_keywords_and_constants(device: str) -> None:
    Pair = namedtuple("Pair", "a b")

    def f(pair: Any, *, scale: float, rest: dict[str, Any]) -> dict[str, Any]:
        return {"s": (pair.a + pair.b) * scale, "r": [rest["x"][0] * 2, "word", None]}

    g = graphed(f)
    a, b, x = (torch.randn(2, device=device) for _ in range(3))
    for scale in (2.0, 3.0, 2.0):
        y = g(Pair(a, b), scale=scale, rest={"x": (x, 7)})
        assert_close(y["s"], (a + b) * scale)
        assert_close(y["r"][0], x * 2)
        assert y["r"][1:] == ["word", None]
    assert g.counts.recorded == 2
    with pytest.raises(UnsupportedError, match=r"type builtins\.object"):
        g(Pair(a, b), scale=1.0, rest={"x": object()})


@torch.no_grad()
def test_numbers_that_compare_equal_are_told_apart(device: str) -> None:
    g = graphed(lambda x, k: x * (2 if k is True else 3))
    x = torch.ones(2, device=device)
    assert g(x, 1)[0] == 3
    assert g(x, True)[0] == 2
    g = graphed(lambda x, k: x * math.copysign(1.0, k))
    assert g(x, 0.0)[0] == 1
    assert g(x, -0.0)[0] == -1


@torch.no_grad()
def test_strided_and_conjugate_free_inputs(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    wide = torch.randn(3, 8, device=device)
    for x in (wide[:, ::2], wide[:, :4], torch.randn(4, 3, device=device).t()):
        assert_close(g(x), model(x))
    z = torch.view_as_complex(torch.randn(3, 4, 2, device=device)).conj().imag
    assert z.is_neg()
    assert_close(g(z.contiguous() if not z.is_neg() else z), model(z))


def test_inference_mode_and_back(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    with torch.inference_mode():
        x = torch.randn(3, 4, device=device)
        assert_close(g(x), model(x))
    with torch.no_grad():
        for x in (torch.randn(3, 4, device=device), torch.randn(3, 8, device=device)[:, ::2]):
            assert_close(g(x), model(x))
    x = torch.randn(3, 4, device=device)
    assert_close(gradients(g, model, x), gradients(model, model, x))


@torch.no_grad()
def test_buffers_are_changed_once_a_call(device: str) -> None:
    ours, theirs = nn.BatchNorm1d(4).to(device), nn.BatchNorm1d(4).to(device)
    g = graphed(ours)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        assert_close(g(x), theirs(x))
    assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 3


@torch.no_grad()
def test_input_buffers_are_not_copied(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    (buffer,) = g.input_buffers(torch.zeros(3, 4, device=device))
    buffer.copy_(torch.randn(3, 4, device=device))
    assert_close(g(buffer), model(buffer))
    assert g.counts.recorded == 1


@torch.no_grad()
def test_arguments_by_address_are_read_and_written_in_place(device: str) -> None:
    def append(cache: Tensor, x: Tensor, *, scale: Tensor) -> Tensor:
        cache.add_(x)
        return cache * scale

    g = graphed(append, by_address=(0, "scale"))
    x, scale = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    for cache in (torch.zeros(2, device=device), torch.ones(2, device=device)):
        start = cache.clone()
        for i in range(1, 4):
            assert_close(g(cache, x, scale=scale), (start + i) * 3)
        assert_close(cache, start + 3)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_reused_outputs_refuse_to_be_read_late(device: str) -> None:
    model = mlp(device)
    g = graphed(model, reuse_outputs=True)
    x = torch.randn(2, 4, device=device)
    y = g(x)
    row, total = y[0], y.sum()
    assert_close(y + 0, model(x))
    assert type(y + 0) is Tensor
    before = model(x).sum()
    g(x * 2)
    for read in (lambda: y + 0, lambda: row.cpu(), lambda: torch.cat([y, y]), lambda: repr(y)):
        with pytest.raises(UnsupportedError, match="later call has overwritten"):
            read()
    assert_close(total, before)
    loop = graphed(nn.Linear(4, 4, device=device), reuse_outputs=True)
    y = loop(x)
    assert loop(y).shape == (2, 4)  # its own output as its next input


@torch.no_grad()
def test_graphs_are_bounded_and_freed(device: str) -> None:
    g = graphed(mlp(device), max_graphs=2)
    for rows in (1, 2, 3, 4, 3, 4, 1):
        g(torch.randn(rows, 4, device=device))
    assert g.counts.recorded == 5
    assert g.counts.freed == 3
    assert "graphs=2" in repr(g)
    g.clear()
    assert "graphs=0" in repr(g)
    x = torch.randn(2, 4, device=device)
    assert_close(g(x), g.target(x))


@torch.no_grad()
def test_a_closures_tensors_are_watched(device: str) -> None:
    weight = torch.randn(4, 4, device=device)
    held = [torch.randn(4, device=device)]

    def f(x: Tensor) -> Tensor:
        return x @ weight + held[0]

    g = graphed(f)
    x = torch.randn(2, 4, device=device)
    assert_close(g(x), f(x))
    weight = torch.randn(4, 4, device=device)
    assert_close(g(x), f(x))
    held[0] = torch.randn(4, device=device)
    assert_close(g(x), f(x))
    weight.add_(1)
    assert_close(g(x), f(x))
    assert g.counts.recorded == 3


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


@torch.no_grad()
def test_a_tensor_from_nowhere_is_refused_unless_named(device: str) -> None:
    holder = Holder(torch.randn(4, device=device))
    x = torch.randn(2, 4, device=device)

    def f(x: Tensor) -> Tensor:
        return x + holder.inner

    with pytest.raises(UnsupportedError, match=r"test_nn_graphed.py:\d+: `return x \+ holder"):
        graphed(f)(x)
    g = graphed(f, watch=[holder.inner])
    assert_close(g(x), f(x))


# ------------------------------------------------------------------------------------ refusals


def read_item(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def read_truth(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def read_shape(x: Tensor) -> Tensor:
    return x[x > 0]


def read_nonzero(x: Tensor) -> Tensor:
    return torch.nonzero(x)


def write_argument(x: Tensor) -> Tensor:
    return x.add_(1)


@pytest.mark.parametrize("f", [read_item, read_truth, read_shape, read_nonzero, write_argument])
def test_what_no_graph_can_hold_names_its_line(device: str, f: Callable[..., Tensor]) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(UnsupportedError, match=r"test_nn_graphed.py:\d+: `return"):
        graphed(f)(x)
    assert torch.equal(x, torch.ones_like(x))
    ok = graphed(mlp(device))
    assert ok(torch.ones(2, 4, device=device)).shape == (2, 3)  # recording still works
    eager = graphed(f, on_unsupported="eager")
    with pytest.warns(UserWarning, match="runs its target plainly"):
        eager(x.clone())
    eager(x.clone())  # said once
    assert counts(eager) == (0, 0, 2)


def test_values_moved_to_another_device_are_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match=r"a copy to meta at .*x\.to\("):
        graphed(lambda x: x.to("meta"))(torch.ones(2, device=device))


@pytest.mark.gpu
def test_a_capture_that_fails_names_its_line_and_leaves_nothing_behind() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0], device="cuda")

    x = torch.ones(1, device="cuda")
    with pytest.raises(UnsupportedError, match=r"test_nn_graphed.py:\d+: `return x \+ torch.t"):
        graphed(f)(x)
    # memory freed on another stream is used again: the allocator knows that no capture runs
    side = torch.cuda.Stream()
    reserved = []
    for _ in range(6):
        big = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        big.record_stream(side)
        del big
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]
    torch.randn(1, device="cuda")  # and so are random numbers
    g = graphed(mlp("cuda"))
    assert g(torch.ones(2, 4, device="cuda")).shape == (2, 3)


def test_rows_that_depend_on_each_other_are_refused(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    for f in (
        nn.BatchNorm1d(4).to(device),
        lambda x: x.softmax(0),
        lambda x: x - x.mean(),
        lambda x: x.sum(),
        lambda x: x * x.shape[0],
        lambda x: x.flip(0),
        lambda x: x.t() @ x,
    ):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="every row of the batch alone"):
            graphed(f, batch_dim=0)(x)
    with torch.no_grad():
        assert_close(graphed(lambda x: x.softmax(0))(x), x.softmax(0))
        norm = nn.BatchNorm1d(4).to(device).eval()
        assert_close(graphed(norm, batch_dim=0)(x), norm(x))


def test_hooks_and_wrappers_are_refused(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    g(x)
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks on ReLU"):
        g(x)
    handle.remove()
    g(x)
    assert g.counts.recorded == 1
    handle = model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(UnsupportedError, match="a gradient hook"):
        graphed(model)(x)
    handle.remove()
    with pytest.raises(UnsupportedError, match="DataParallel"):
        graphed(nn.DataParallel(model))(x)
    with pytest.raises(InputError, match="copy or pickle"):
        copy.deepcopy(g)
    with pytest.raises(InputError, match="copy or pickle"):
        pickle.dumps(g)


def test_options_are_checked() -> None:
    for options in (
        {"max_graphs": 0},
        {"batch_buckets": [4]},
        {"batch_dim": 0, "batch_buckets": []},
        {"batch_dim": 0, "batch_buckets": [0]},
        {"on_unsupported": "ignore"},
        {"batch_dim": -1},
    ):
        with pytest.raises(InputError, match="graphed"):
            graphed(nn.ReLU(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="module or function"):
        graphed(3)  # type: ignore[arg-type]


def test_a_cpu_tensor_is_refused_or_runs_plainly() -> None:
    model, x = mlp("cpu"), torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="one cuda device"):
        graphed(model)(x)
    g = graphed(model, on_unsupported="eager")
    with pytest.warns(UserWarning, match=r"tensor on cpu|argument on cpu"):
        assert_close(g(x), model(x))
    assert_close(g(x), model(x))  # said once


# ------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("batch_dim", [None, 0])
def test_gradients_are_the_callables(device: str, rows: int, batch_dim: int | None) -> None:
    model = mlp(device, middle=nn.GELU)
    g = graphed(model, batch_dim=batch_dim)
    for _ in range(3):
        x = torch.randn(rows, 4, device=device)
        assert_close(gradients(g, model, x), gradients(model, model, x))
    assert counts(g) == (1, 3, 0)


def test_gradients_accumulate_and_are_never_overwritten(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    one, two = gradients(model, model, x1)[1:], gradients(model, model, x2)[1:]
    model.zero_grad()
    g(x1).square().sum().backward()
    first = [p.grad for p in model.parameters()]
    kept = [t.clone() for t in first if t is not None]
    g(x2).square().sum().backward()
    assert_close(
        [p.grad for p in model.parameters()], [a + b for a, b in zip(one, two, strict=True)]
    )
    model.zero_grad(set_to_none=True)
    g(x1).square().sum().backward()
    held = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    g(x2).square().sum().backward()
    assert_close(held, kept)


def test_a_training_output_is_kept_and_its_graph_free_after_the_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    y = g(torch.randn(2, 4, device=device))
    kept = y.detach().clone()
    y.sum().backward()
    g(torch.randn(2, 4, device=device)).sum().backward()
    assert torch.equal(y, kept)
    assert g.counts.recorded == 1


def test_training_follows_the_optimizer(device: str) -> None:
    ours = mlp(device)
    theirs = copy.deepcopy(ours)
    g = graphed(ours, batch_dim=0)
    steps = [
        (run, torch.optim.Adam(m.parameters(), 0.01)) for run, m in ((g, ours), (theirs, theirs))
    ]
    for i in range(6):
        x, target = torch.randn(5 - i % 2, 4, device=device), torch.randn(3, device=device)
        for run, optimizer in steps:
            optimizer.zero_grad()
            (run(x) - target).square().mean().backward()
            optimizer.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()))
    assert counts(g) == (2, 6, 0)


def test_two_forwards_before_a_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    for _ in range(2):
        model.zero_grad()
        (g(x1).sum() * 2 + g(x2).square().sum()).backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        (model(x1).sum() * 2 + model(x2).square().sum()).backward()
        assert_close(ours, [p.grad for p in model.parameters()])
    assert g.counts.recorded == 2  # one graph for each forward under way
    for _ in range(4):
        g(x1)  # dropped without a backward: its graph is free again
    gc.collect()
    assert g.counts.recorded == 2


def test_a_graph_leaves_only_after_its_backward(device: str) -> None:
    model = mlp(device)
    g = graphed(model, max_graphs=1)
    x1, x2 = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device)
    expected = gradients(model, model, x1)[1:]
    model.zero_grad()
    loss = g(x1).square().sum()
    with torch.no_grad():
        g(x2)
        g(x2 * 3)
    loss.backward()
    assert_close([p.grad for p in model.parameters()], expected)


def test_frozen_parameters_unused_inputs_and_mixed_outputs(device: str) -> None:
    model = mlp(device)
    model[0].weight.requires_grad_(False)

    def f(x: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = model(x)
        return y, y.argmax(-1), y.detach()

    g = graphed(f)
    x, unused = (torch.randn(2, 4, device=device, requires_grad=True) for _ in range(2))
    y, index, detached = g(x, unused)
    assert y.requires_grad
    assert not index.requires_grad
    assert not detached.requires_grad
    y.sum().backward()
    assert unused.grad is None
    assert model[0].weight.grad is None
    ours = [x.grad, model[0].bias.grad, model[2].weight.grad]
    assert x.grad is not None
    x.grad = None
    model.zero_grad()
    f(x, unused)[0].sum().backward()
    assert_close(ours, [x.grad, model[0].bias.grad, model[2].weight.grad])
    model[0].weight.requires_grad_(True)
    g(x, unused)[0].sum().backward()
    assert model[0].weight.grad is not None


def test_padded_rows_add_nothing_to_gradients(device: str) -> None:
    layer = nn.Linear(4, 3, device=device)

    def f(x: Tensor) -> Tensor:
        return layer(x / x.norm(dim=-1, keepdim=True))  # a row of zeros would be NaN

    g = graphed(f, batch_dim=0)
    x = torch.randn(5, 4, device=device)
    gradients(g, layer, torch.full((8, 4), float("nan"), device=device))
    assert_close(gradients(g, layer, x), gradients(f, layer, x))


def test_what_a_replayed_backward_cannot_do_is_refused(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    loss = g(x).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="retain_graph"):
        loss.backward()
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
    loss = g(x).square().sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(UnsupportedError, match="modified in place"):
        loss.backward()
    loss = g(x).square().sum()
    with torch.no_grad():
        model[2].bias.add_(1)  # no backward reads a bias
    loss.backward()


def test_autocast_training(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)

    def under(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return run(x).float()

        return call

    for _ in range(2):
        assert_close(gradients(under(g), model, x), gradients(under(model), model, x))
        with torch.no_grad():
            model[0].weight.mul_(1.5)


# ------------------------------------------------------------------------------------ company


@pytest.mark.gpu
def test_recorded_inside_another_capture_the_kernels_join_it() -> None:
    model = mlp("cuda")
    g = graphed(model)
    x = torch.randn(2, 4, device="cuda")
    with torch.no_grad():
        g(x)
        outer = torch.cuda.CUDAGraph()
        with torch.cuda.graph(outer):
            y = g(x)
        x.copy_(torch.randn(2, 4, device="cuda"))
        outer.replay()
        assert_close(y, model(x))
    assert g.counts.plain == 1


@torch.no_grad()
def test_nested_graphed_callables_record_once(device: str) -> None:
    inner = graphed(mlp(device))
    outer = graphed(lambda x: inner(x) * 2, watch=[inner.target])
    x = torch.randn(2, 4, device=device)
    assert_close(outer(x), inner.target(x) * 2)
    assert inner.counts.recorded == 0


@torch.no_grad()
def test_compiled_and_transformed_callers_see_the_callable(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    assert_close(torch.func.vmap(g)(x), model(x))
    assert g.counts.recorded == 0


def test_buffers_are_written_by_the_replay_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, a replay on another stream may still read what the call is about to write."""
    monkeypatch.setattr(module_of_graphed, "CudaRecorder", TapeRecorder)
    model = mlp("cpu")
    g = graphed(model)
    x = torch.randn(2, 4, requires_grad=True)
    g(x).sum().backward()  # recorded
    (entry,) = g._graphs._graphs._values.values()
    buffers = [t for t in (*entry.statics, *entry.dys) if t is not None]
    seen: list[int] = []
    real = Tape.replay

    def noted(self: Tape, *given: Any) -> None:
        seen.append(sum(t._version for t in buffers))
        real(self, *given)

    monkeypatch.setattr(Tape, "replay", noted)
    before = sum(t._version for t in buffers)
    g(x).sum().backward()
    assert seen[0] == before
    assert seen[1] == before + 1  # x
    assert sum(t._version for t in buffers) == before + 2  # dy


def test_threads_and_streams_share_one_object(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            for i in range(30):
                x = torch.randn(1 + (seed + i) % 8, 4, generator=generator).to(device)
                y = g(x)
                if not torch.allclose(y, model(x), atol=1e-4):
                    wrong.append(f"thread {seed}, call {i}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert g.counts.recorded == 4


@pytest.mark.gpu
@torch.no_grad()
def test_memory_is_bounded_and_given_back() -> None:
    layer = nn.Linear(1024, 1024, device="cuda")
    g = graphed(layer, max_graphs=2)
    x = torch.randn(4096, 1024, device="cuda")
    for rows in (4096, 4095):
        g(x[:rows])
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for rows in range(4000, 4010):
        g(x[:rows])
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
    g.clear()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held - 4 * 4000 * 1024 * 4 + (1 << 20)
    assert_close(g(x), layer(x))
