# Two commands: `make train` and `make test`. Each makes its virtual environment first.
# PYTHON=... chooses the interpreter (>= 3.11), VENV=... the folder of the environment.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := $(VENV)/bin
CONFIG ?= configs/ttt_linear_bytes.py
ARGS ?=
PYTEST_ARGS ?= -m "not slow"

.PHONY: help train test lint types benchmark format clean

help:
	@echo "make train      train a byte-level TTT-Linear language model on this machine"
	@echo "make test       lint, type check and test"
	@echo "make benchmark  print timing ratios"
	@echo "make format     format the code"

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
	rm -rf $(VENV) .venv312 build dist *.egg-info
