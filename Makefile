# Two commands: `make train` and `make test`. Each makes its virtual environment first.
# PYTHON=... chooses the interpreter (>= 3.11), VENV=... the folder of the environment.

VENV ?= .venv
TARGETS_VENV ?= .venv-targets
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := $(VENV)/bin
CONFIG ?= configs/ttt_linear_bytes.py
ARGS ?=
PYTEST_ARGS ?= -m "not slow"

.PHONY: help train test test-targets lint types benchmark format clean

help:
	@echo "make train         train a byte-level TTT-Linear language model on this machine"
	@echo "make test          lint, type check and test"
	@echo "make test-targets  compile the kernels for TPU and GPU targets, without the hardware"
	@echo "make benchmark     print timing ratios"
	@echo "make format        format the code"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "jaxmodels needs Python >= 3.11; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[train]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@ $(VENV)/.train

train: $(VENV)/.train
	@$(BIN)/jaxmodels train $(CONFIG) $(ARGS)

test: lint types
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# The compilers of TPU (libtpu) and CUDA run without their hardware. They live in an environment of
# their own (3 GB), so that the other tests see a plain CPU installation.
$(TARGETS_VENV)/.targets: pyproject.toml
	$(PYTHON) -m venv $(TARGETS_VENV)
	$(TARGETS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,triton]" libtpu
	version=$$($(TARGETS_VENV)/bin/python -c "from importlib.metadata import version; print(version('jax'))") && \
	$(TARGETS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12
	@touch $@

test-targets: $(TARGETS_VENV)/.targets
	JAX_PLATFORMS=cpu $(TARGETS_VENV)/bin/python -m pytest -n 2 --durations=5 \
		tests/targets tests/pallas_kernels/test_ttt_triton_gpu.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

benchmark: $(VENV)/.dev
	for f in benchmarks/*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(TARGETS_VENV) .venv312 build dist *.egg-info
