# The two main commands are `make demo` and `make test`. Each installs what it needs first.
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help setup demo test test-all lint bench clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## Create .venv with all development dependencies
	@scripts/setup dev

demo:  ## Install, then run the demo on this machine
	@scripts/setup demo
	$(BIN)/stoker demo

test:  ## Install, then run all checks and tests except the slow ones
	@scripts/setup dev
	@$(MAKE) --no-print-directory lint
	@scripts/test

test-all:  ## Install, then run all checks and tests, slow ones included
	@scripts/setup all
	@$(MAKE) --no-print-directory lint
	@scripts/test -m ''

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench:  ## Run the benchmarks; writes bench/results.md and the plots
	@scripts/setup dev
	$(BIN)/python bench/run.py

clean:  ## Delete the virtual environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
