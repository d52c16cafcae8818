# The two commands to know: `make demo` and `make test`. Each sets up what it needs first.
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help setup demo test test-all lint bench clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## Make .venv with everything for development
	@scripts/setup dev

demo:  ## Install, then walk the whole road on this machine
	@scripts/setup demo
	$(BIN)/stoker demo

test:  ## Install, then check and test everything but the long drills
	@scripts/setup dev
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest

test-all:  ## The same with the long drills
	@scripts/setup all
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -m ''

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench:  ## Measure against the peers; writes bench/results.md and the plots
	@scripts/setup dev
	$(BIN)/python bench/run.py

clean:  ## Remove the virtual environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
