# Everything runs in .venv, made once; `make PYTHON=python3.12 venv` chooses another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Compiled tests are kept from run to run: to rewrite the asserts of all files takes each worker 4 s.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PACKAGES := tests/vllm/real/requirements.txt
PACKAGES := disagg kernels staging transport prefill_node decode_node deploy
SOURCES := $(PACKAGES) tests docs .ci

.PHONY: help venv demo test sample test-slow test-gpu test-vllm test-ecosystem check format clean

help:
	@echo "make demo       install, then run the demo: prefill on two ranks, decode on one"
	@echo "make test       every test without a GPU; of long sweeps a sample"
	@echo "make test-slow  the rest of the sweeps, and tests longer than a minute"
	@echo "make sample     choose the variants that make test runs, by CPU time and branches (an hour)"
	@echo "make test-gpu   the tests that need CUDA devices"
	@echo "make test-vllm  the connector inside vLLM on a CPU, in an environment of its own"
	@echo "make test-ecosystem  clients, evaluation and load tools against disagg serve; TOOLS=\"openai aiperf\" selects"
	@echo "make check      ruff, mypy, import-linter, sizes of functions"
	@echo "make format     ruff format and the fixes that are safe"
	@echo "make venv       only install, into $(VENV)"
	@echo "make clean      remove caches and output; keeps $(VENV)"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "disagg needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/disagg demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 4 --dist loadfile

# A pass with coverage takes twice as long as a test run. Waits that are too short for it fail tests, which is no error.
sample: export PYTHONPATH = tests/support
sample: $(STAMP)
	rm -rf .sample
	for pass in costs branches; do SAMPLE_PASS=$$pass $(BIN)/python -m pytest -n 4 --dist loadfile \
		-p sample_recorder -m 'not gpu and (not slow or variant)' -o filterwarnings= || true; done
	$(BIN)/python tests/support/choose_sample.py

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1800

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu --timeout 900

$(VLLM_STAMP): pyproject.toml constraints.txt $(VLLM_PACKAGES)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r $(VLLM_PACKAGES)
	@touch $@

# vLLM and its dependencies print warnings of their own, which are no errors here.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -o filterwarnings= tests/vllm/real

test-ecosystem: $(STAMP)
	PYTHONPATH=.:tests/support $(BIN)/python tests/ecosystem/run.py $(TOOLS)

check: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/shape.py

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist out .sample *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
