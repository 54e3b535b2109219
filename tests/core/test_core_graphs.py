"""Recorders, pools, copies, buckets, the bounded table, and the inspection of a run."""

from __future__ import annotations

import pytest
import torch

from fastlinear.core import graphs
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.graph_inspect import Inspection
from fastlinear.core.graphs import (
    POWERS_OF_TWO,
    CudaRecorder,
    Pool,
    Recorder,
    Table,
    bucket_of,
    checked_buckets,
)
from tests.core.graph_tape import TapeRecorder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return TapeRecorder() if request.param == "cpu" else CudaRecorder()


@torch.no_grad()
def test_a_recording_computes_at_replay_only(recorder: Recorder) -> None:
    device = torch.device(recorder.device_type)
    x = torch.ones(4, device=device)
    recorder.warm(lambda: x * 2, device, 1)
    assert not recorder.busy()
    seen = []
    recording = recorder.record(
        lambda: (seen.append(recorder.busy()), (x * 2).exp())[1], device, Pool()
    )
    assert seen == [True]
    for value in (1.0, 2.0):
        x.fill_(value)
        recording.replay()
        torch.testing.assert_close(recording.outputs, (x * 2).exp())


@torch.no_grad()
def test_what_fails_while_recording_comes_out_and_recording_goes_on(recorder: Recorder) -> None:
    device, pool = torch.device(recorder.device_type), Pool()
    x = torch.ones(4, device=device)

    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        recorder.record(fails, device, pool)
    with pytest.raises(RuntimeError, match="captur"):
        recorder.record(lambda: x.sum().item(), device, pool)
    assert pool.graphs == 0
    assert not recorder.busy()
    recording = recorder.record(lambda: x + 1, device, pool)
    recording.replay()
    assert recording.outputs.tolist() == [2.0] * 4


def test_buffers_are_filled_after_the_streams_are_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay on another stream may still read what is about to be written."""
    seen: list[str] = []

    class Graph:
        def replay(self) -> None:
            seen.append("replay")

    monkeypatch.setattr(graphs, "_raw_stream", lambda device: 7)
    monkeypatch.setattr(graphs, "_last_raw", {0: 5})
    monkeypatch.setattr(graphs, "_follow", lambda device: seen.append(f"follow {device}"))
    pool = Pool()
    pool.graphs = 1
    recording = graphs.CudaRecording(Graph(), None, pool, torch.device("cuda", 0))  # type: ignore[arg-type]
    recording.replay(lambda *given: seen.append(f"fill {given}"), 1, 2)
    assert seen == ["follow 0", "fill (1, 2)", "replay"]


@pytest.mark.gpu
@torch.no_grad()
def test_a_pool_outlives_its_graphs() -> None:
    recorder, pool, device = CudaRecorder(), Pool(), torch.device("cuda")
    x = torch.ones(1 << 20, device=device)
    for _ in range(3):
        one, two = (recorder.record(lambda: (x + 1) * 2, device, pool) for _ in range(2))
        assert pool.graphs == 2
        one.replay()
        two.replay()
        assert one.outputs[0].item() == two.outputs[-1].item() == 4
        del one, two
        assert pool.graphs == 0


def test_buckets() -> None:
    assert [bucket_of(r, POWERS_OF_TWO) for r in (1, 2, 3, 65, 4096, 4097)] == [
        1,
        2,
        4,
        128,
        4096,
        None,
    ]
    assert checked_buckets("f", [8, 2, 8]) == (2, 8)
    for wrong in ([], [0], [1.5], [True]):
        with pytest.raises(InputError, match="f: expected batch_buckets"):
            checked_buckets("f", wrong)  # type: ignore[arg-type]


def test_the_table_drops_what_was_not_used_for_longest() -> None:
    table: Table[str] = Table(2)
    table.put(1, "one")
    table.put(2, "two")
    assert table.get(1) == "one"
    assert table.make_room() == ["two"]
    table.put(3, "three")
    assert table.get(2) is None
    assert len(table) == 2
    assert table.make_room(2) == ["one", "three"]


def test_an_inspection_knows_what_was_read_written_and_drawn() -> None:
    device = torch.device("cpu")
    x, buffer, other = torch.ones(3), torch.zeros(3), torch.ones(3)
    generator = torch.Generator()
    state = generator.get_state()
    inspection = Inspection("f", device, [x], [buffer])
    with inspection:
        buffer.add_(x * 2 + torch.tensor([1.0, 2.0, 3.0]))
        torch.rand(3, generator=generator)
    assert inspection.random
    assert torch.equal(inspection.generators[0][1], state)
    assert buffer.any()
    inspection.restore()
    assert not buffer.any()
    with (
        pytest.raises(UnsupportedError, match=r"from elsewhere at .*test_core_graphs.py"),
        Inspection("f", device, [x], [buffer]),
    ):
        x + other
    with pytest.raises(UnsupportedError, match="writes into one"), Inspection("f", device, [x], []):
        x.mul_(2)
    with (
        pytest.raises(UnsupportedError, match="depend on values"),
        Inspection("f", device, [x], []),
    ):
        x[x > 0]
    with Inspection("f", device, [x], []):
        x[torch.tensor([0, 1])]


@pytest.mark.parametrize(("shape", "what"), [((), "a number held in"), ((3,), "values of")])
def test_values_on_the_host_are_refused_even_where_known(shape: tuple[int, ...], what: str) -> None:
    scale = torch.ones(shape)
    with (
        pytest.raises(UnsupportedError, match=f"{what} a cpu tensor read at .*test_core_graphs"),
        Inspection("f", torch.device("cuda"), [], [scale]),
    ):
        scale * 2
    with Inspection("f", torch.device("cuda"), [], []):
        torch.tensor(1.0) * 2  # a constant of the code is recorded as it is


def test_statistics_that_a_schema_hides_are_put_back() -> None:
    norm, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3)
    inspection = Inspection("f", torch.device("cpu"), [x], [*norm.parameters(), *norm.buffers()])
    with inspection, torch.no_grad():
        norm(x)
    assert norm.running_mean.any()
    inspection.restore()
    assert not norm.running_mean.any()
    assert torch.equal(norm.running_var, torch.ones(3))
    assert norm.num_batches_tracked == 0
