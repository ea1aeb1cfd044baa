# Two commands do everything on a fresh machine: `make serve` and `make test`. `make help` lists the rest.
#
#   PYTHON=python3.12       the Python to make .venv with (3.11 or newer)
#   TORCH_INDEX=URL         another package index for torch, such as one with CPU builds
#   PORT=8080 ARGS="..."    for serve; ARGS also goes to pytest
#   JOBS=4                  test processes at a time: they wait more than they compute, and take up to 2 GiB each

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PORT ?=
ARGS ?=
JOBS ?= 4

# What stays together in one process, and why: tests/conftest.py. The longest comes first, and must not be put last.
PARALLEL = $(if $(filter-out 0 1,$(JOBS)),-n $(1) --no-loadscope-reorder)

BIN := $(VENV)/bin
#: Files that say what is installed: a change of one installs again, otherwise a second run is instant.
INPUTS := pyproject.toml constraints.txt scripts/install.sh
INSTALL = PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_INDEX="$(TORCH_INDEX)" scripts/install.sh

# Where it is set, every test process and every process that those start compiles each file again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install dev clients model serve wheel test test-slow lint format types layers check gpu-check secrets clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/installed: $(INPUTS)
	$(INSTALL)
	@touch $@

$(VENV)/installed-dev: $(INPUTS)
	$(INSTALL) --group dev
	@touch $(VENV)/installed $@

$(VENV)/installed-clients: $(INPUTS)
	$(INSTALL) --group dev --group clients
	@touch $(VENV)/installed $(VENV)/installed-dev $@

install: $(VENV)/installed ## .venv with Prelay in it

dev: $(VENV)/installed-dev ## … and the tools of its developers

clients: $(VENV)/installed-clients ## … and the clients of others that it is tested with (300 MB)

model: $(VENV)/installed ## fetch the demo model, once
	$(BIN)/prelay model fetch-demo

serve: $(VENV)/installed ## set up, fetch the demo model, serve on http://127.0.0.1:8000 (PORT=, ARGS=)
	$(BIN)/prelay serve $(if $(PORT),--port $(PORT)) $(ARGS)

wheel: $(VENV)/installed ## dist/*.whl with compiled kernels, for machines without a compiler
	PRELAY_WHEEL_KERNELS=1 $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

test: dev model ## the test suite, without what takes minutes (ARGS= goes to pytest)
	$(BIN)/python -m pytest -m "not slow" $(call PARALLEL,$(JOBS)) $(ARGS)

test-slow: dev model ## the tests that take minutes each, two at a time (JOBS=1: one)
	$(BIN)/python -m pytest -m slow $(call PARALLEL,2) $(ARGS)

lint: dev ## ruff, hadolint, and what docker compose makes of docker-compose.yml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint deploy/docker/Dockerfile
	$(BIN)/docker-compose --profile '*' config --quiet

format: dev ## ruff: put in order what can be
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev ## mypy, strict
	$(BIN)/mypy

layers: dev ## import-linter: who may import whom
	$(BIN)/lint-imports

check: lint types layers test ## all of these

gpu-check: ## prove on this machine's GPU what no other can run (ARGS=--help; needs no installation)
	$(PYTHON) scripts/gpu_check.py $(ARGS)

secrets: ## passwords and an API key for docker-compose.yml, as files in ./secrets
	scripts/secrets.sh

clean: ## remove .venv and all caches of the tools
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
