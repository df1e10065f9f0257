# Set-up, demo and tests of hvdplus; `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NP     ?= 2

# In containers and on build machines everything runs as root, which Open MPI wants to be told; no GPU log lines.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench check format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-zA-Z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with everything in it, Horovod built (minutes the first time)

$(READY): requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/hvdplus install-horovod
	@touch $@

demo: $(READY)  ## train a convolutional network on real digits with horovodrun, two ranks (NP=2)
	$(BIN)/horovodrun --gloo -np $(NP) python examples/torch_mnist.py

test: $(READY)  ## run the whole test suite
	$(BIN)/python -m pytest

test-%: $(READY)  ## run the multi-rank tests with that many ranks only, as in make test-4
	$(BIN)/python -m pytest tests/multirank --ranks $*

bench: $(READY)  ## time the exchange of gradients between hosts on this machine (BENCH="--quick" and other options)
	$(BIN)/python benchmarks/exchange.py $(BENCH)

check: $(READY)  ## lint, format, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY)  ## put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove .venv and what tools left; built Horovod wheels stay in the user's cache
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
