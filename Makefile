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
.PHONY: help setup demo test bench check format clean docker docker-cuda docker-demo

help:  ## show this list
	@awk -F ':.*## ' '/^[a-zA-Z%-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

# --- containers ------------------------------------------------------------------------------------------------
# CONTAINER_TOOL is docker, podman or buildah; BUILD_FLAGS are further options for its `build`, as in
# make docker BUILD_FLAGS="--build-arg FRAMEWORKS=torch".
CONTAINER_TOOL ?= docker
BUILD_FLAGS    ?=
export IMAGE   ?= hvdplus:cpu
IMAGE_CUDA     ?= hvdplus:cuda
image_build     = $(CONTAINER_TOOL) build -f docker/Dockerfile --build-arg PIP_EXTRA_INDEX_URL

docker:  ## build the container image for CPUs (CONTAINER_TOOL=docker, podman or buildah)
	$(image_build) -t $(IMAGE) $(BUILD_FLAGS) .

docker-cuda:  ## build the container image for CUDA and NCCL
	$(image_build) -t $(IMAGE_CUDA) \
		--build-arg BUILD_BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 \
		--build-arg FRAMEWORKS=torch --build-arg HOROVOD_OPTIONS=--with-nccl $(BUILD_FLAGS) .

docker-demo: docker  ## train across two containers; with buildah as root, on network namespaces
ifeq ($(CONTAINER_TOOL),buildah)
	$(MAKE) setup
	$(BIN)/python docker/compose_buildah.py
else
	$(CONTAINER_TOOL) compose -f docker/compose.yaml up --no-build --abort-on-container-exit --exit-code-from boxa; \
		code=$$?; $(CONTAINER_TOOL) compose -f docker/compose.yaml down --volumes; exit $$code
endif
