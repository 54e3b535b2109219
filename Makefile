# make demo   optimize four models, end with a table, plans and reports (no GPU needed)
# make test   run the tests
# make test-quick  run a short choice of them, for less than 90 s on two cores (first run: minutes)
# make matrix  run tests/matrix.txt with the constrained versions, then with the newest ones
# make check  format, lint, types, import layers, documentation examples, tests
# make fuzz   random calls of every op, for SECONDS=600 from SEED=0 on
# make sanitize  small calls of every kernel: C++ under address and undefined-behaviour sanitizers,
#                CUDA under compute-sanitizer where both are there
# make gpu    device tests and benchmark on a CUDA machine
#
# Everything runs in .venv, made on first use. Set FASTLINEAR_PYTHON to use an environment of your
# own instead (a GPU machine that brings its torch): nothing is installed then.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
NEWEST := .venv-newest
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

ifdef FASTLINEAR_PYTHON
RUN := PYTHONPATH=$(CURDIR)/src:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(FASTLINEAR_PYTHON)
DEMO_READY :=
TEST_READY :=
CHECK_READY :=
else
RUN := $(VENV)/bin/python
DEMO_READY := $(VENV)/.ready-demo
TEST_READY := $(VENV)/.ready-test
CHECK_READY := $(VENV)/.ready-check
endif

.PHONY: help demo test test-quick matrix fuzz check lint gpu sanitize clean

help:
	@grep '^# make' Makefile | sed 's/^# //'

demo: $(DEMO_READY)
	HF_HUB_OFFLINE=1 $(RUN) -m examples.demo

test: $(TEST_READY)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -q -n auto --maxprocesses 4

# tests/quick.txt chooses. Compiled C++ is kept from run to run; its names cover source and compiler.
test-quick: $(TEST_READY)
	mkdir -p -m 700 .test-builds
	HF_HUB_OFFLINE=1 FASTLINEAR_TESTS_BUILDS=$(CURDIR)/.test-builds \
		$(RUN) -m pytest -q -n 2 -m "not gpu and not slow" @tests/quick.txt

# What depends on versions: compiled and interpreted Triton kernels, registered ops, rewriting.
MATRIX = -m pytest -q -n 2 -m "not gpu" @tests/matrix.txt
matrix: $(TEST_READY) $(NEWEST)/.ready
	HF_HUB_OFFLINE=1 $(RUN) $(MATRIX)
	HF_HUB_OFFLINE=1 $(NEWEST)/bin/python $(MATRIX)

SEED ?= 0
SECONDS ?= 600
fuzz: $(TEST_READY)
	$(RUN) -m tests.fuzz.fuzz --seed $(SEED) --seconds $(SECONDS)

lint: $(CHECK_READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

check: lint test

KERNEL_TESTS := tests/families tests/kernels tests/fastpath tests/native tests/activations

# The ops side by side; then, in one process, what times or profiles the device or owns its graphs.
gpu: $(TEST_READY)
	$(RUN) -m fastlinear doctor
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -q -m gpu -n auto --maxprocesses 6 $(KERNEL_TESTS)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -q -m gpu $(KERNEL_TESTS:%=--ignore=%)
	$(RUN) -m fastlinear bench linear --device cuda --quick --out demo-output/linear.jsonl \
		--html demo-output/linear.html

# C++ first; then memcheck and racecheck, or what they lack (exit code 5).
sanitize: $(TEST_READY)
	$(RUN) -m tests.families.sanitize_cpu
	$(RUN) -m tests.families.sanitize_families || test $$? -eq 5

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing fastlinear and what the demo needs into $(VENV) (minutes, once)"
	$(PIP) -e '.[models,plots]'
	@touch $@

# torch's CUDA builds bring their own Triton; a CPU build has none, and the tests that interpret
# kernels need one.
$(VENV)/.ready-test: $(VENV)/.ready-demo
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) 'triton==3.6.0' || true
	$(PIP) -e '.[models,plots,test]'
	@touch $@

# No constraints: what "pip install fastlinear" brings today, which "rm -r .venv-newest" renews.
$(NEWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[models,plots,test]'
	@touch $@

$(VENV)/.ready-check: $(VENV)/.ready-test
	$(PIP) -e '.[models,plots,test,check]'
	@touch $@

clean:
	rm -rf demo-output build .test-builds .pytest_cache .mypy_cache .ruff_cache .hypothesis
