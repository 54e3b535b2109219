"""Problem, cost, device, settings, precision, errors: the small records everything stands on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastlinear as fl
from fastlinear.core import cost, errors
from fastlinear.core import device as device_module
from fastlinear.core.cost import Ceilings, Cost, floor_us, roofline
from fastlinear.core.device import device_facts, slugify
from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem, bucket_size
from fastlinear.core.settings import Config, cache_dir

names = st.text("abcdefgh_", min_size=1, max_size=6)
problems = st.builds(
    Problem,
    family=names,
    piece=names,
    dims=st.dictionaries(st.sampled_from("MKNGLH"), st.integers(0, 1 << 40)).map(
        lambda d: tuple(d.items())
    ),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    device=st.sampled_from(["cpu", "cuda"]),
    options=st.dictionaries(names, st.text(max_size=6)).map(lambda d: tuple(d.items())),
    needs_grad=st.booleans(),
    precision=st.sampled_from(["n/a", "highest", "high"]),
)


@given(problems)
def test_problem_survives_json(problem: Problem) -> None:
    again = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem
    assert again.key() == problem.key()
    assert problem.bucketed().key() == problem.key()
    assert problem.describe()


@given(st.integers(1, 1 << 60))
def test_bucket_is_the_nearest_power_of_two(size: int) -> None:
    bucket = bucket_size(size)
    assert bucket & (bucket - 1) == 0
    # within a factor of sqrt(2), exactly, in integers
    assert size * size <= 2 * bucket * bucket
    assert bucket * bucket <= 2 * size * size
    assert bucket_size(bucket) == bucket


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_bucket_is_monotonic(a: int, b: int) -> None:
    assert (a <= b) <= (bucket_size(a) <= bucket_size(b))


def test_only_batch_dims_are_bucketed() -> None:
    p = Problem("f", "forward", (("M", 100), ("K", 100), ("N", 7)), "float32", "cpu")
    assert p.bucketed().dims == (("M", 128), ("K", 100), ("N", 7))
    assert bucket_size(0) == 0
    assert (p.dim("K"), p.option("absent")) == (100, "")
    assert p.with_piece("backward").piece == "backward"


def test_every_field_of_a_problem_is_in_its_key() -> None:
    base = Problem("f", "p", (("M", 4), ("K", 3)), "float32", "cpu", (("a", "b"),), False, "high")
    changed = [
        Problem("g", "p", base.dims, "float32", "cpu", base.options, False, "high"),
        Problem("f", "q", base.dims, "float32", "cpu", base.options, False, "high"),
        Problem("f", "p", (("M", 4), ("K", 4)), "float32", "cpu", base.options, False, "high"),
        Problem("f", "p", base.dims, "float16", "cpu", base.options, False, "high"),
        Problem("f", "p", base.dims, "float32", "cuda", base.options, False, "high"),
        Problem("f", "p", base.dims, "float32", "cpu", (("a", "c"),), False, "high"),
        Problem("f", "p", base.dims, "float32", "cpu", base.options, True, "high"),
        Problem("f", "p", base.dims, "float32", "cpu", base.options, False, "highest"),
    ]
    assert len({p.key() for p in [base, *changed]}) == len(changed) + 1


@pytest.mark.parametrize("dtype", list(FLOAT_DTYPES))
def test_ceilings_are_measured_for_every_dtype_the_cpu_runs(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN has no float16 products on many processors; torch has them everywhere."""
    monkeypatch.setattr(cost, "_product_sizes", lambda *_: (32,))
    monkeypatch.setattr(cost, "_COPY_BYTES", {"cpu": 1 << 16})
    found = cost.measure_ceilings.__wrapped__("cpu", dtype)
    assert found.flops_per_s > 0
    assert found.bytes_per_s > 0


def test_float32_is_held_against_the_tensor_cores_where_those_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = {torch.float32: 5e13, torch.bfloat16: 6e14}
    monkeypatch.setattr(cost, "_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(cost, "_product_rate", lambda _, dtype: rates[dtype])
    measure = cost.measure_ceilings.__wrapped__
    assert measure("cpu", "float32").flops_per_s == 5e13
    monkeypatch.setattr(cost, "_has_split_products", lambda *_: True)
    assert measure("cpu", "float32").flops_per_s == pytest.approx(1e14)
    rates[torch.bfloat16] = 2e14
    assert measure("cpu", "float32").flops_per_s == 5e13


def test_cost_and_roofline() -> None:
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e11)
    compute = Cost(flops=2e6, bytes=1e4)
    memory = Cost(flops=1e3, bytes=1e6)
    assert floor_us(compute, ceilings) == pytest.approx(2.0)
    assert floor_us(memory, ceilings) == pytest.approx(10.0)
    assert floor_us(compute + memory, ceilings) == pytest.approx(10.1)
    placed = roofline(memory, ceilings, measured_us=20.0)
    assert (placed.bound, placed.fraction) == ("memory", pytest.approx(0.5))
    assert placed.bytes_per_s == pytest.approx(5e10)
    assert roofline(compute, ceilings, 2.0).to_json()["fraction"] == pytest.approx(1.0)
    assert json.dumps(placed.to_json())


def test_cpu_facts() -> None:
    facts = device_facts("cpu")
    assert (facts.kind, facts.capability, facts.units) == ("cpu", (0, 0), torch.get_num_threads())
    assert facts.name
    assert facts.slug == slugify(facts.name)
    assert json.dumps(facts.to_json())


def test_cpu_facts_follow_the_thread_count() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert device_facts("cpu").units == 1
        torch.set_num_threads(2)
        assert device_facts("cpu").units == 2
    finally:
        torch.set_num_threads(threads)


def test_slugs_are_fit_for_file_names() -> None:
    assert slugify("NVIDIA H200") == "nvidia-h200"
    assert slugify("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-xeon-cpu-2-20ghz"
    assert slugify("../../etc") == "etc"


def test_cpu_name_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device_module.cpu_name.cache_clear()
    monkeypatch.setattr(device_module, "Path", lambda _: tmp_path / "absent")
    assert isinstance(device_module.cpu_name(), str)
    device_module.cpu_name.cache_clear()


def test_precision_follows_torch() -> None:
    torch.set_float32_matmul_precision("high")
    assert matmul_precision(torch.float32) == "high"
    assert matmul_precision(torch.bfloat16) == "n/a"


@pytest.mark.parametrize(
    ("scheme", "word"), [("ieee", "highest"), ("tf32", "high"), ("bf16", "medium")]
)
def test_precision_set_for_one_backend(scheme: str, word: str) -> None:
    """torch's own question raises once its newer setting has been used; ours answers."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = scheme
    try:
        assert matmul_precision(torch.float32) == word
        x, weight = torch.randn(4, 8), torch.randn(5, 8)
        y = fl.linear_act(x, weight, activation="relu")
        torch.testing.assert_close(y, torch.relu(x @ weight.t()), rtol=0.1, atol=0.1)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "training"},
        {"draws": 0},
        {"optimizer_steps": 0},
        {"time_budget_s": 0.0},
        {"time_budget_s": float("nan")},
        {"min_speedup": 0.0},
        {"min_speedup": float("nan")},
        {"min_speedup": float("inf")},
        {"families": "linear_act"},
    ],
)
def test_config_refuses(wrong: dict) -> None:
    with pytest.raises(InputError) as caught:
        Config(**wrong)
    error = caught.value
    assert error.function == "Config"
    assert next(iter(wrong)) in error.expected
    assert str(next(iter(wrong.values()))) in error.received
    assert error.remedy


def test_config_is_immutable() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.mode = "train"  # type: ignore[misc]


def test_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", "/some/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.delenv("FASTLINEAR_CACHE_DIR")
    assert cache_dir().name == "fastlinear"


def test_errors_state_function_expected_received_remedy() -> None:
    error = InputError("f", "a", "b", "Do c.")
    assert str(error) == "f: expected a; received b. Do c."
    kinds = [
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, FastlinearError)
    ]
    codes = {e.__name__: e.exit_code for e in kinds}
    assert codes["InputError"] == codes["PlanError"] == codes["ModelLoadError"] == 2
    assert (codes["NumericsError"], codes["UnsupportedError"]) == (3, 5)
    assert issubclass(errors.InputError, ValueError)


def test_import_is_light() -> None:
    """No Triton, transformers, matplotlib, rich, jinja2 or CUDA context comes with the import."""
    code = (
        "import sys, fastlinear, torch\n"
        "heavy = {'triton', 'transformers', 'matplotlib', 'rich', 'jinja2', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "False"]
