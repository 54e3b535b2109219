"""README's two tables of results are what the committed rows say."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.harness.rows import read_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES = {
    "quack": "QuACK",
    "cublaslt_cuda_graph": "cuBLASLt in a CUDA graph",
    "liger": "Liger-Kernel",
    "compile": "compiled",
    "compile_einsum": "compiled einsum",
    "compile_stacked": "compiled, stacked weights",
}


class Line(NamedTuple):
    """One line of the table of the GPU: its words, and where its numbers are."""

    words: str
    file: str
    problem: str
    direction: str
    metric: str = "device"
    ours: str = "fastlinear"


BF16, BOTH = "bfloat16", "forward+backward"
GPU = (
    Line(
        f"Linear + tanh-GELU, 8192 x 768 → 3072, {BF16}, forward",
        "linear-bf16-headline.jsonl",
        "gelu_tanh M8192 K768 N3072 bfloat16",
        "forward",
    ),
    Line(
        "the same, forward and backward",
        "linear-bf16-headline.jsonl",
        "gelu_tanh M8192 K768 N3072 bfloat16",
        BOTH,
    ),
    Line(
        "8192 x 4096 → 4096, float32, forward and backward",
        "linear-fp32.jsonl.gz",
        "gelu_tanh M8192 K4096 N4096 float32",
        BOTH,
    ),
    Line(
        f"8 x (Linear 256 + ReLU), 64 rows, {BF16}, by the call",
        "overhead.jsonl.gz",
        "relu M64 L8 H256 bfloat16",
        "forward",
        "wall",
    ),
    Line(
        "8 x (Linear 1024 + ReLU), 64 rows, float32",
        "overhead.jsonl.gz",
        "relu M64 L8 H1024 float32",
        "forward",
    ),
    Line(
        f"100 linears of 100 → 100, 4096 rows, {BF16}, forward",
        "groups.jsonl.gz",
        "relu M4096 G100 K100 N100 bfloat16",
        "forward",
    ),
    Line(
        "the same, forward and backward",
        "groups.jsonl.gz",
        "relu M4096 G100 K100 N100 bfloat16",
        BOTH,
    ),
    Line(
        f"SwiGLU MLP, 4096 x 1024 → 4096 → 1024, {BF16}, forward and backward",
        "gated-mlp.jsonl.gz",
        "silu M4096 K1024 H4096 N1024 bfloat16 no bias",
        BOTH,
    ),
    Line(
        "SwiGLU MLP, 64 x 4096 → 11008 → 4096, forward",
        "gated-mlp.jsonl.gz",
        "silu M64 K4096 H11008 N4096 bfloat16 no bias",
        "forward",
    ),
    Line(
        f"diagonal layer, 32768 x 512, {BF16}, forward and backward",
        "pseudo-linear.jsonl.gz",
        "none M32768 K512 bfloat16",
        BOTH,
    ),
    Line(
        "GPT-2, 4 x 128 tokens, float32, compiled after rewriting",
        "models.jsonl",
        "gpt2 B4 T128 L12 float32",
        "forward",
        ours="fastlinear_compile",
    ),
)
PROCESSORS = (
    "intel-xeon-processor-2-50ghz/{}.jsonl",
    "intel-xeon-processor/{}.jsonl",
    "amd-epyc/{}.jsonl",
    "amd-epyc/{}-avx2.jsonl.gz",
    "amd-epyc/{}-zen5.jsonl.gz",
)
CPU = (
    ("8 x (Linear 64 + ReLU), one row", "linear", "relu M1 K64 N64 L8 float32", "forward"),
    ("8 x (Linear 1024 + ReLU), 64 rows", "linear", "relu M64 K1024 N1024 L8 float32", "forward"),
    ("the same, a training step", "linear", "relu M64 K1024 N1024 L8 float32", "step"),
    (
        "8 x (Linear 1024 + ReLU), 1024 rows",
        "linear",
        "relu M1024 K1024 N1024 L8 float32",
        "forward",
    ),
    ("GPT-2, 1 x 128 tokens", "models", "gpt2 B1 T128 L12 float32", "forward"),
)


@functools.cache
def read(path: str) -> list[dict[str, Any]]:
    return read_rows(ROOT / "results" / path)


def times(path: str, problem: str, direction: str, metric: str) -> dict[str, tuple[float, bool]]:
    """Contender → (median µs, whether it is ours) of one plain case."""
    found = {}
    for row in read(path):
        if (row["problem"], row["direction"], row["metric"]) != (problem, direction, metric):
            continue
        if row["median_us"]:
            assert row["contender"] not in found, f"{path}: two rows of {problem}"
            found[row["contender"]] = (row["median_us"], row["ours"])
    assert found, f"{path} has no {problem} {direction} {metric}"
    return found


def us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def gpu_line(line: Line) -> str:
    found = times(f"nvidia-h200/{line.file}", line.problem, line.direction, line.metric)
    peers = {name: t for name, (t, ours) in found.items() if not ours}
    compiled = min(t for name, t in peers.items() if name.startswith("compile"))
    best = min(peers, key=peers.__getitem__)
    ours = found[line.ours][0]
    last = f"**{us(ours)}**" if ours < peers[best] else us(ours)
    named = f"{us(peers[best])} ({NAMES[best]})"
    return f"| {line.words} | {us(peers['eager'])} | {us(compiled)} | {named} | {last} |"


def cpu_line(words: str, file: str, problem: str, direction: str) -> str:
    cells = []
    for processor in PROCESSORS:
        found = times(processor.format(file), problem, direction, "wall")
        ours = found["fastlinear"][0]
        compiled = min(t for name, (t, _) in found.items() if name.startswith("compile"))
        cells.append(f"{found['eager'][0] / ours:.2f}, {compiled / ours:.2f}")
    return f"| {words} | {' | '.join(cells)} |"


@pytest.mark.parametrize("line", GPU, ids=lambda line: line.words)
def test_the_gpus_table_has_the_rows_medians(line: Line) -> None:
    assert gpu_line(line) in README.splitlines()


@pytest.mark.parametrize("line", CPU, ids=lambda line: line[0])
def test_the_cpus_table_has_the_rows_ratios(line: tuple[str, str, str, str]) -> None:
    assert cpu_line(*line) in README.splitlines()


def test_no_other_lines_stand_in_the_tables() -> None:
    text = README.partition("<!-- results:begin -->")[2].partition("<!-- results:end -->")[0]
    known = {gpu_line(line) for line in GPU} | {cpu_line(*line) for line in CPU}
    lines = [line for line in text.splitlines() if line.startswith("|")]
    others = [line for line in lines if line not in known and not line.startswith("|-")]
    assert len(others) == 2, "two heads"
