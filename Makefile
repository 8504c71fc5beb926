# `make demo` and `make test` do all their own set-up: a virtual environment in .venv and
# the package installed in it. They need Python 3.11 or later and a package index, nothing else.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/pip install --quiet --disable-pip-version-check
WORKERS ?= 2

.PHONY: demo test test-all test-torch lint types format docs bench dist smoke clean

demo: $(VENV)/.demo
	@echo "finding the wrong labels among handwritten digits (about a minute on two CPU cores)"
	$(BIN)/python -u -m experiments cleaning --data digits --out runs/demo

# The core: within minutes. `make test-all` adds types, estimators, command line, documentation and
# experiments.
test: lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --tier 1

test-all: lint types
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --tier all

# PyTorch is large and no part of `all`: it has an environment of its own.
test-torch:
	$(MAKE) VENV=$(VENV)/torch $(VENV)/torch/.torch
	$(VENV)/torch/bin/pytest --tier all tests/apps/test_torch.py src/foretune/torch

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, with a notebook of each example, in site/.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.core

# The wheel and the source distribution, with checks of what is in them.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/dist.py dist

# The wheel in a bare environment away from the repository: with a JAX, with extras, or with the
# oldest versions that it allows: make smoke PYTHON=python3.12 JAX=0.11.2 EXTRAS=apps,data LOWEST=1
smoke: dist
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	  "$$(ls dist/*.whl)$(if $(EXTRAS),[$(EXTRAS)])" $(if $(JAX),jax==$(JAX)) \
	  $(if $(LOWEST),$$($(BIN)/python tests/dist.py dist --lowest "$(EXTRAS)")) && \
	cp tests/smoke.py "$$folder" && cd "$$folder" && \
	env -u PYTHONPATH venv/bin/python smoke.py

# What is installed, by a file for each: all that a developer needs holds what the demo needs, too.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing foretune and its development tools into $(VENV) (some minutes the first time)"
	$(PIP) --upgrade "pip>=25.1" # the first with --group
	$(PIP) --editable '.[all]' --group dev
	@touch $(VENV)/.demo $@

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing foretune into $(VENV) (a minute or two the first time)"
	$(PIP) --editable '.[apps,data]'
	@touch $@

$(VENV)/.torch: pyproject.toml | $(BIN)/python
	@echo "installing foretune and PyTorch into $(VENV) (some minutes the first time)"
	$(PIP) --upgrade "pip>=25.1" # the first with --group
	$(PIP) --editable '.[data,torch]' --group test transformers
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "foretune needs Python 3.11 or later; run: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@echo "setting up $(VENV): a Python environment for this folder"
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
