# In a fresh clone, `make run` starts a server and `make test` runs the tests. `make help` lists all targets.

PYTHON ?= python3
MODEL ?= smollm2:135m
PORT ?= 8000

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The build tools are installed into .venv at their pinned versions, so that `make native` continues pip's build.
INSTALL := $(PIP) install -qq -c constraints.txt scikit-build-core nanobind cmake ninja && \
	$(PIP) install -qq -c constraints.txt --no-build-isolation
# pip does not compile an editable package to bytecode. Without bytecode every start takes 0.2 s longer.
COMPILE := $(BIN)/python -m compileall -q quire
# The compiler of the GPU kernels. Tests compile them on machines without a GPU too. It is not in constraints.txt, because
# torch for a GPU depends on its own version. It exists for Linux only. On other systems these tests are skipped.
TRITON := triton==3.6.0
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

# The C++ kernels. pip configures $(NATIVE) when it installs; without pip, the first `make native` does.
# A build directory cannot change its generator, so there is one for each generator.
NATIVE = build/native$(if $(NINJA),,-make)
SANITIZED := build/sanitized
SANITIZED_TESTS ?= tests/kernels/native
CMAKE = $(or $(wildcard $(BIN)/cmake),cmake)
NINJA = $(or $(wildcard $(BIN)/ninja),$(shell command -v ninja))
CONFIGURE = $(CMAKE) -S csrc $(if $(NINJA),-G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(NINJA))) \
	-DPython_EXECUTABLE="$(or $(abspath $(wildcard $(BIN)/python)),$(shell command -v $(PYTHON)))"
BUILD = MAKEFLAGS= $(CMAKE) --build
JOBS := --parallel $(shell getconf _NPROCESSORS_ONLN)
BUILD_NATIVE = { { [ -f $(NATIVE)/CMakeCache.txt ] && [ ! -f quire/kernels/cpu/native_missing.txt ]; } \
	|| $(CONFIGURE) -B $(NATIVE); } && $(BUILD) $(NATIVE) $(JOBS)
BUILD_NATIVE_QUIETLY = mkdir -p build && { { $(BUILD_NATIVE); } > $(NATIVE).log 2>&1 || { cat $(NATIVE).log >&2; exit 1; }; }

.DEFAULT_GOAL := help
.PHONY: help run install native test test-core test-cuda test-sanitized lint format clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(INSTALLED) ## Install, fetch the default model and serve it; Ctrl-C stops.
	@$(BUILD_NATIVE_QUIETLY)
	@$(BIN)/quire pull "$(MODEL)"
	@exec $(BIN)/quire serve "$(MODEL)" --port $(PORT)

install: $(INSTALLED) ## Install quire into .venv.
	@$(BUILD_NATIVE_QUIETLY)

native: ## Build the C++ kernels into quire/kernels/cpu/. Needs cmake, a C++ compiler and nanobind, but no .venv.
	@$(BUILD_NATIVE)

test: $(INSTALLED_DEV) ## Run every test that this machine can run.
	@$(BUILD_NATIVE_QUIETLY)
	@$(BIN)/pytest

test-core: $(INSTALLED_DEV) ## Run the tests that need no torch (seconds).
	@$(BIN)/pytest -m core

test-cuda: ## Run the tests that need an NVIDIA GPU, with a Python that has torch for it. Without a GPU they are skipped.
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest tests/cuda

# The tests run in a copy of the package that has only the sanitized kernels, so no other build can be loaded.
test-sanitized: $(INSTALLED_DEV) ## Run the C++ kernels' tests under AddressSanitizer and UBSan.
	@rm -rf $(SANITIZED)/tree && mkdir -p $(SANITIZED)/tree
	@cp -r quire tests pyproject.toml $(SANITIZED)/tree && rm -f $(SANITIZED)/tree/quire/kernels/cpu/_native*.so
	@$(CONFIGURE) -B $(SANITIZED)/cmake -DCMAKE_BUILD_TYPE=Debug -DQUIRE_SANITIZE=ON \
		-DQUIRE_PACKAGE_DIR="$(CURDIR)/$(SANITIZED)/tree/quire" > $(SANITIZED)/configure.log || { cat $(SANITIZED)/configure.log; exit 1; }
	@$(BUILD) $(SANITIZED)/cmake $(JOBS)
	@grep -q __asan_load $(SANITIZED)/tree/quire/kernels/cpu/_native*.so
	@cd $(SANITIZED)/tree && export LD_PRELOAD="$$(cat ../cmake/preload.txt)" \
		ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:log_path="$$PWD/report" \
		UBSAN_OPTIONS=print_stacktrace=1:log_path="$$PWD/report" && \
		"$(CURDIR)/$(BIN)/python" -c 'import os, quire.kernels.cpu._native as n; \
			assert n.__file__.startswith(os.getcwd() + os.sep), n.__file__; print("Sanitized:", n.__file__)' && \
		"$(CURDIR)/$(BIN)/python" -m pytest -p no:cacheprovider --capture=sys $(SANITIZED_TESTS) || touch report.failed
	@! cat $(SANITIZED)/tree/report.* 2> /dev/null

lint: $(INSTALLED_DEV) ## Check style and types.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED_DEV) ## Format the code and apply ruff's fixes.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## Remove caches and build outputs. .venv and fetched models are kept.
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage *.egg-info
	@rm -f quire/kernels/cpu/_native*.so quire/kernels/cpu/native_missing.txt
	@find quire tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" > /dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "quire needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1). Name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$("$(PYTHON)" --version)."
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire and what it needs into $(VENV) (a few minutes the first time)."
	@$(INSTALL) -e .
	@$(COMPILE)
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire with its development tools into $(VENV) (a few minutes the first time)."
	@$(INSTALL) -e '.[dev]'
	@$(COMPILE)
	@$(BIN)/python -c 'import triton' 2> /dev/null || [ "$$(uname -s)" != Linux ] || $(PIP) install -qq --no-deps $(TRITON)
	@touch $@ $(INSTALLED)
