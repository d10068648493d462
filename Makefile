# From a fresh clone: `make run` answers a question, `make test` tests. `make help` lists the rest.

PYTHON ?= python3
MODEL ?= smollm2:135m
PROMPT ?= Why is the sky blue? Answer in two sentences.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help run install test test-core lint format clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(INSTALLED) ## Install, fetch the default model, answer a question, and chat if this is a terminal.
	@$(BIN)/quire pull "$(MODEL)"
	@$(BIN)/quire generate "$(MODEL)" --chat -p "$(PROMPT)" --max-tokens 80
	@if [ -t 0 ] && [ -t 1 ]; then $(BIN)/quire chat "$(MODEL)"; fi

install: $(INSTALLED) ## Install quire into .venv.

test: $(INSTALLED_DEV) ## Run every test that this machine can run.
	@$(BIN)/pytest

test-core: $(INSTALLED_DEV) ## Run the tests that need no torch (seconds).
	@$(BIN)/pytest -m core

lint: $(INSTALLED_DEV) ## Check style and types.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED_DEV) ## Format the code and repair what ruff can.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## Remove caches and build outputs; .venv and fetched models stay.
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage *.egg-info
	@find quire tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" > /dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "quire needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1). Name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$("$(PYTHON)" --version)."
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire and what it needs into $(VENV) (a minute or two the first time)."
	@$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing quire with its development tools into $(VENV) (a minute or two the first time)."
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@touch $@ $(INSTALLED)
