# `make demo` and `make test` need nothing but Python 3.11 or later; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

COMPILED := .venv-compiled

# Two tests at once, as two cores can bear; a file that takes long does not hold the other core up.
AT_ONCE := -n 2 --dist worksteal

.PHONY: help setup compiled test-compiled demo demo-replicas test test-slow test-vllm check format clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv with the pinned dependencies

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

compiled: $(COMPILED)/ready  ## make .venv-compiled: what a request runs through is compiled

$(COMPILED)/ready: requirements.txt pyproject.toml setup.py $(shell find events indexer kvrouter -name '*.py')
	$(PYTHON) -m venv $(COMPILED)
	$(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	KVROUTER_COMPILED=1 $(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	rm -rf build
	touch $(COMPILED)/ready

demo: $(READY)  ## four simulated engines and the router, compared with round robin
	$(BIN)/kvrouter demo

demo-replicas: $(READY)  ## three routers that agree over NATS
	$(BIN)/kvrouter demo --replicas 3

test: $(READY)  ## the tests (a few minutes)
	$(BIN)/python -m pytest $(AT_ONCE)

test-compiled: $(COMPILED)/ready  ## the tests, with what a request runs through compiled
	KVROUTER_TEST_COMPILED=1 $(COMPILED)/bin/pytest $(AT_ONCE)

test-slow: $(READY)  ## the long tests
	$(BIN)/python -m pytest -m slow --timeout 900

test-vllm: $(READY)  ## two real vLLM servers on the CPU (installs them into .venv-vllm)
	$(BIN)/python -m pytest -m vllm --timeout 1800 -s tests/vllm

check: $(READY)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(COMPILED) .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
