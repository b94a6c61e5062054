# Everything here works on a machine that has only Python 3.11 or newer, make and git: each target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Which build of PyTorch: extra arguments for pip, such as an --index-url for CPU-only or CUDA wheels.
TORCH_PIP_ARGS ?=
TORCH := $(shell sed -n 's/^ *"\(torch[<>=].*\)",.*/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup run test gpu gpu-test gpu-bench soak bench peers lint format protos protos-baseline clean

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything in it, kernels compiled (TORCH_PIP_ARGS chooses PyTorch's build)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=/path/to/it")'
	@echo "[1/4] making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=24'
	@echo "[2/4] installing PyTorch (large: minutes on a slow line)"
	@$(PIP) $(TORCH_PIP_ARGS) '$(TORCH)'
	@echo "[3/4] installing the packages and what they need"
	@$(PIP) --editable '.[dev]'
	@echo "[4/4] compiling kernels into the cache"
	@$(BIN)/ssd-drafter precompile
	@touch $@

run: $(READY) ## serve a workload with and without drafts, show the difference (3 minutes)
	@$(BIN)/ssd-engine demo --out build

test: $(READY) ## run the tests
	@echo "running the tests (about 8 minutes)"
	@$(BIN)/python -m pytest

GPU_ARGS ?=
# A GPU machine may have no network to install from: where $(PYTHON) has PyTorch, the source tree alone will do.
ON_GPU = python=$(BIN)/python; \
	[ -x $$python ] || python=$(PYTHON); \
	$$python -c 'import torch' 2>/dev/null || { $(MAKE) --no-print-directory setup && python=$(BIN)/python; } || exit 1; \
	if [ -f .gpu/setup.sh ] && $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then PYTHON=$$python . .gpu/setup.sh || exit 1; fi; \
	$$python

gpu: ## on a machine with a GPU: its tests, then its benchmarks, at most 9 minutes; see docs/gpu.md
	@status=0; $(MAKE) --no-print-directory gpu-test || status=1; $(MAKE) --no-print-directory gpu-bench || status=1; exit $$status

gpu-test gpu-bench: SHELL := bash

gpu-test: ## the tests that need a GPU (GPU_TEST_ARGS="--time 4")
	@$(ON_GPU) -m benchmarks.gpu.tests $(GPU_TEST_ARGS)

gpu-bench: ## what the engine does on a GPU, into benchmarks/results and docs/gpu.md (GPU_ARGS="--part decode")
	@$(ON_GPU) -m benchmarks.gpu $(GPU_ARGS)

SOAK_MINUTES ?= 60

soak: $(READY) ## mixed load for SOAK_MINUTES, then the randomised tests with many more examples (hours)
	@$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES)
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest

bench: $(READY) ## measure drafting and the engine's steps
	@$(BIN)/python -m benchmarks.index --tokens 1M
	@$(BIN)/python -m benchmarks.steps

peers: $(READY) ## install the drafters that benchmarks/replay.py compares with (needs a C++20 compiler)
	@$(PIP) cmake nanobind==2.9.2 ninja setuptools wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps arctic-inference==0.3.0

lint: $(READY) ## check style, types, and that the contract breaks no client
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against protos/baseline.binpb

format: $(READY) ## put the code into the style that lint checks
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

protos-baseline: $(READY) ## at a release: later contracts are checked against this one
	@$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

protos: $(READY) ## generate the stubs from protos/
	@$(BIN)/python -m grpc_tools.protoc -Idrafter_service/stubs=protos/ssd/drafter/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. drafter_service/stubs/drafter.proto

clean: ## remove what was built, .venv included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
