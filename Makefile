# Everything that a contributor types. Each target makes .venv first when it is missing or out of date.
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
# Seconds for the whole test run, three times what it takes on two usual cores; a single test has its own limit in pyproject.toml.
TEST_LIMIT_S ?= 3600
# Processes that `make test` starts to run tests: on 2 cores a third one computes while others wait. 0 for none, as a debugger needs.
WORKERS ?= 3
export PYTHON

.PHONY: help demo test test-all lint types contracts bench check docs reference wheel newest clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	@scripts/install.sh $@

demo: $(STAMP)  ## train a small GPT over four peers on this machine, and check it against plain torch
	@$(BIN)/meshcee demo $(ARGS)

test: $(STAMP)  ## the tests that take less than 20 s each; ARGS="tests/dht -x" narrows
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not slow" \
		--session-timeout=$(TEST_LIMIT_S) $(ARGS)

test-all: $(STAMP)  ## every test, in one process: some four hours on 2 cores
	$(BIN)/python -m pytest --session-timeout=28800 $(ARGS)

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

contracts: $(STAMP)  ## imports only downward: peers -> dht -> meshcee
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## the executor against a plain loop, the transport against raw streams
	$(BIN)/python benchmarks/overhead.py $(ARGS)

check: lint types contracts test  ## what a change must pass

docs: $(STAMP)  ## build the documents into site/; every link and heading must be there
	$(BIN)/python -m mkdocs build --strict

reference: $(STAMP)  ## write docs/reference/ from the code
	$(BIN)/python scripts/reference.py

wheel: $(STAMP)  ## build the wheel and test it in an empty environment
	@scripts/wheel_test.sh

newest:  ## every example with the newest libraries that pip finds; ARGS=FOLDER keeps their environment
	@scripts/newest.sh $(ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
