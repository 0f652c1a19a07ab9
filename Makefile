# Each target works from a bare machine: it makes .venv and installs what it needs.
#   make test    formatting, lints, types, then the tests
#   make demo    trains, interrupts and resumes a small model
#   make check   formatting, lints and types only
#   make bench   measures flaxckpt beside other checkpointers (a quarter of an hour)
#   make test-frameworks
#                tests with torch, Hugging Face datasets, TensorFlow and keras, which
#                are large: in an environment of their own, .venv-frameworks
#   make fuzz    gives each parser changed files, for FUZZ_SECS seconds each: in an
#                environment of its own, .venv-fuzz; what is found is in fuzz-findings
#   make clean   removes all that these targets made

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
FUZZ_SECS ?= 300
BENCH_ARGS ?= --json bench-results/results.json --picture bench-results/results.svg

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS_VENV)/.installed
FUZZ_VENV := .venv-fuzz
FUZZ_INSTALLED := $(FUZZ_VENV)/.installed

.PHONY: demo test test-frameworks fuzz check bench clean

demo: $(INSTALLED)
	@$(BIN)/python -m examples.demo

test: check
	@echo "==> pytest $(PYTEST_ARGS)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-frameworks: $(FRAMEWORKS_INSTALLED)
	@echo "==> pytest tests/frameworks"
	@$(FRAMEWORKS_VENV)/bin/python -m pytest tests/frameworks

fuzz: $(FUZZ_INSTALLED)
	@echo "==> fuzz, $(FUZZ_SECS) s for each target"
	@cd tests && ../$(FUZZ_VENV)/bin/python -m fuzz --guided --secs $(FUZZ_SECS) --keep ../fuzz-findings

check: $(INSTALLED)
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> mypy"
	@$(BIN)/mypy

bench: $(BENCH_INSTALLED)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("flaxckpt wants Python 3.11 or newer, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@echo "==> Installing flaxckpt with its test and example dependencies into $(VENV)"
	@echo "    (once, and again when pyproject.toml changes; takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,examples]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "==> Installing the other checkpointers"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

$(FRAMEWORKS_INSTALLED): pyproject.toml
	@echo "==> Installing flaxckpt with the frameworks of its tests into $(FRAMEWORKS_VENV)"
	@$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	@$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,frameworks]'
	@touch $@

$(FUZZ_INSTALLED): pyproject.toml
	@echo "==> Installing flaxckpt with atheris into $(FUZZ_VENV)"
	@$(PYTHON) -m venv $(FUZZ_VENV)
	@$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,fuzz]'
	@touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS_VENV) $(FUZZ_VENV) demo-run report-run fuzz-findings bench-results .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
