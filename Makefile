# `make demo` trains on this machine, `make test` runs every check. Both first set up a virtual environment in .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: the package and what its examples need, or that and what tests need besides.
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
SITE := $(VENV)/.site
LOWEST := $(VENV)-lowest
# Processes that test at a time. Each starts others, and waits for them: on two processors three keep both busy.
WORKERS ?= 3
# Fixtures of a file, such as a cluster, are made once. A process that dies ends the run: xdist would wait for ever for the tests of
# another one in its place.
DIST := --dist loadfile --max-worker-restart 0
# pip would compile 19,000 files, one after another, of which tests import 3,000. Python compiles what it imports, and keeps it. What
# every process imports is compiled at once, for shells that forbid to keep what is compiled.
INSTALL := install -q --no-compile --disable-pip-version-check
# Tests start hundreds of processes. Each would compile the package anew where the environment forbids to keep what is compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-lowest test-processors test-gpu test-wheel bench docs docs-site format clean

help:
	@echo "make demo            train a small network on handwritten digits: 2 groups of 2 workers and 2 model servers"
	@echo "make test            formatting, types, import contracts and tests"
	@echo "make test-processors numeric tests with the kernels of older processors"
	@echo "make test-lowest the core's tests with the lowest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make test-wheel      build the wheel, install it alone in a new environment, and train there"
	@echo "make test-gpu        what needs a GPU, with the machine's own python3 and torch; needs no package index"
	@echo "make bench           measure network, collectives, servers, start-up and simulated and emulated worlds"
	@echo "make docs            write docs/topology.md and docs/reference from the code, launch/jobset.yaml, and the shipped profiles"
	@echo "make docs-site       build the documentation's site in site/, and check every link of it"
	@echo "make format          put the code into the form that make test asks for"
	@echo "make clean           remove .venv, caches and runs"

demo: $(DEMO)
	$(BIN)/zmqtrain launch launch/digits.toml

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Types take a processor half a minute, and the tests leave one free now and then.
	@log=$$(mktemp); ($(BIN)/mypy && $(BIN)/lint-imports) >$$log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) $(DIST) --durations=20; tests=$$?; \
	wait $$types; types=$$?; cat $$log; rm -f $$log; test $$tests = 0 && test $$types = 0

# The numeric tests once more with the kernels of older processors, and with more threads; with ARGS=few a minute's choice of them.
test-processors: $(READY)
	$(BIN)/python -m tests.on_processors $(ARGS)

# The parts that meet other packages most.
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) $(DIST) $(addprefix tests/,wire topology net exchange train embed c10d cli)

# Builds with pip's index; the environment is a temporary one.
test-wheel: $(DEMO)
	$(BIN)/python -m tests.wheel

test-gpu:
	@$(PYTHON) -m tests.device $(ARGS)

bench: $(DEMO)
	@for name in net collectives host server launch simulate emulate fidelity merged; do $(BIN)/python -m benchmarks $$name || exit; done

docs: $(READY)
	$(BIN)/python docs/make_topology.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_jobset.py
	$(BIN)/python docs/make_profiles.py

docs-site: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html in a browser"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) runs build dist site .gpu-wheels .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find zmqtrain benchmarks tests examples -name __pycache__ -prune -exec rm -rf {} +

# Done again when what is to be installed has changed.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zmqtrain needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[examples]'
	@$(BIN)/python -c 'import torch._dynamo, zmqtrain.cli.main'
	@touch $@

$(READY): $(DEMO)
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[examples,dev]'
	@touch $@

$(SITE): $(DEMO)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/pip || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q --disable-pip-version-check -c constraints-lowest.txt -e '.[examples,test]'
	@touch $@
