# In a fresh clone, `make run` starts a server and `make test` runs the tests. `make help` lists all targets.

PYTHON ?= python3
MODEL ?= smollm2:135m
PORT ?= 8000

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The build tools are installed into .venv at their pinned versions, so that `make native` continues pip's build.
INSTALL_TOOLS := $(PIP) install -qq -c constraints.txt scikit-build-core nanobind cmake ninja
INSTALL := $(INSTALL_TOOLS) && $(PIP) install -qq -c constraints.txt --no-build-isolation
LIST_REQUIREMENTS := import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')
WHY_NO_KERNELS := from quire.kernels import isa; from quire.kernels.cpu import native; \
	print(getattr(native.find(isa.prepare()), 'reason', ''))
# pip does not compile an editable package to bytecode. Without bytecode every start takes 0.2 s longer.
COMPILE := $(BIN)/python -m compileall -q quire
# The compiler of the GPU kernels. Tests compile them on machines without a GPU too. It is not in constraints.txt, because
# torch for a GPU depends on its own version. It exists for Linux only. On other systems these tests are skipped.
TRITON := triton==3.6.0
INSTALLED := $(VENV)/.installed
MISSING := quire/kernels/cpu/native_missing.txt
INSTALLED_DEV := $(VENV)/.installed-dev

# The C++ kernels. pip configures $(NATIVE) when it installs; without pip, the first `make native` does.
# A build directory cannot change its generator, so there is one for each generator.
NATIVE = build/native$(if $(NINJA),,-make)
TEST_PROCESSES ?= 2
SANITIZED := build/sanitized
SANITIZED_TESTS ?= tests/kernels/native tests/speculative
ARM := build/arm
ARM_TESTS ?= $(addprefix tests/kernels/native/test_,bits.py logits.py logprobs.py matmul.py pool.py sample.py)
PORTABLE := build/portable
CMAKE = $(or $(wildcard $(BIN)/cmake),cmake)
NINJA = $(or $(wildcard $(BIN)/ninja),$(shell command -v ninja))
CONFIGURE = $(CMAKE) -S csrc $(if $(NINJA),-G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(NINJA))) \
	-DPython_EXECUTABLE="$(or $(abspath $(wildcard $(BIN)/python)),$(shell command -v $(PYTHON)))"
BUILD = MAKEFLAGS= $(CMAKE) --build
JOBS := --parallel $(shell getconf _NPROCESSORS_ONLN)
BUILD_NATIVE = { { [ -f $(NATIVE)/CMakeCache.txt ] && [ ! -f $(MISSING) ]; } \
	|| $(CONFIGURE) -B $(NATIVE); } && $(BUILD) $(NATIVE) $(JOBS)
BUILD_NATIVE_QUIETLY = mkdir -p build && { { $(BUILD_NATIVE); } > $(NATIVE).log 2>&1 || { cat $(NATIVE).log >&2; exit 1; }; }

.DEFAULT_GOAL := help
.PHONY: help run install native wheel test test-core test-cuda test-sanitized test-arm test-portable test-wheel lint format clean

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
	@$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile

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

# An emulator runs a 64-bit Arm Python. The tests run in a copy of the package that has only the kernels for Arm. qemu starts
# no threads after a fork, and does not limit memory. So tests of that are left out.
test-arm: $(INSTALLED_DEV) ## Cross-compile the C++ kernels for 64-bit Arm and run their tests under qemu (minutes).
	@$(BIN)/python tests/arm/install.py $(ARM)
	@rm -rf $(ARM)/tree && mkdir -p $(ARM)/tree && cp -r quire tests pyproject.toml $(ARM)/tree
	@rm -f $(ARM)/tree/quire/kernels/cpu/_native*.so
	@$(CONFIGURE) -B $(ARM)/cmake --toolchain "$(CURDIR)/tests/arm/toolchain.cmake" \
		-DPython_EXECUTABLE="$(CURDIR)/$(ARM)/python" \
		-DQUIRE_PACKAGE_DIR="$(CURDIR)/$(ARM)/tree/quire" > $(ARM)/configure.log || { cat $(ARM)/configure.log; exit 1; }
	@$(BUILD) $(ARM)/cmake $(JOBS)
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/native/test_symbols.py
	@cd $(ARM)/tree && PYTHONDONTWRITEBYTECODE=1 ../python -m pytest -p no:cacheprovider -k 'not fork and not refuses' $(ARM_TESTS)

# The copy has only kernels that do without the calls of Linux, as those of other systems do.
test-portable: $(INSTALLED_DEV) ## Run the tests of the C++ kernels' threads without the calls that only Linux has.
	@rm -rf $(PORTABLE)/tree && mkdir -p $(PORTABLE)/tree && cp -r quire tests pyproject.toml $(PORTABLE)/tree
	@rm -f $(PORTABLE)/tree/quire/kernels/cpu/_native*.so
	@$(CONFIGURE) -B $(PORTABLE)/cmake -DQUIRE_PORTABLE=ON -DQUIRE_PACKAGE_DIR="$(CURDIR)/$(PORTABLE)/tree/quire" \
		> $(PORTABLE)/configure.log || { cat $(PORTABLE)/configure.log; exit 1; }
	@$(BUILD) $(PORTABLE)/cmake $(JOBS)
	@cd $(PORTABLE)/tree && "$(CURDIR)/$(BIN)/python" -m pytest -p no:cacheprovider \
		$(addprefix tests/kernels/native/test_,pool.py bits.py recorded.py)

wheel: $(BIN)/python ## Build a wheel with the C++ kernels into dist/.
	@$(INSTALL_TOOLS)
	@$(PIP) wheel -qq --no-deps --no-build-isolation -w dist . && ls dist/*.whl

test-wheel: $(INSTALLED_DEV) ## Build the wheel, install it into an empty environment and ask it something (minutes).
	@rm -rf dist && $(MAKE) -s wheel
	@QUIRE_TEST_WHEEL=1 $(BIN)/pytest -s tests/test_wheel.py

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

# The kernels are compiled while pip downloads what quire needs. A make of its own finds the tools just installed.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire and what it needs into $(VENV) (a minute the first time)."
	@$(INSTALL_TOOLS) && mkdir -p build && $(BIN)/python -c "$(LIST_REQUIREMENTS)" > build/requirements.txt
	@$(MAKE) -s native > build/native.log 2>&1 & $(PIP) install -qq -c constraints.txt -r build/requirements.txt; \
		status=$$?; wait; exit $$status
	@$(INSTALL) --no-deps -e .
	@$(COMPILE)
	@reason=$$($(BIN)/python -c "$(WHY_NO_KERNELS)"); if [ -n "$$reason" ]; then echo "$$reason." \
		"Installing torch instead, which is large and several times slower."; $(INSTALL) -e '.[torch]'; fi
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire with its development tools into $(VENV) (a few minutes the first time)."
	@$(INSTALL) -e '.[dev]'
	@$(COMPILE)
	@$(BIN)/python -c 'import triton' 2> /dev/null || [ "$$(uname -s)" != Linux ] || $(PIP) install -qq --no-deps $(TRITON)
	@touch $@ $(INSTALLED)
