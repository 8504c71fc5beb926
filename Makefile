# `make demo` and `make test` do all their own set-up: a virtual environment in .venv and
# the package installed in it. They need Python 3.11 or later and a package index, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-torch docs notebooks lint types bench format dist smoke clean

demo: $(VENV)/.apps
	$(BIN)/foretune run cleaning --data digits --out runs/demo

test: lint types
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# PyTorch is large and no part of `all`: it has an environment of its own.
test-torch:
	$(MAKE) VENV=$(VENV)/torch $(VENV)/torch/.data $(VENV)/torch/.test $(VENV)/torch/.torch
	$(VENV)/torch/bin/pytest tests/test_torch.py src/foretune/torch

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.all
	$(BIN)/pyright

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

notebooks: $(VENV)/.docs
	$(BIN)/python examples/notebooks/make.py

format: $(VENV)/.all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.all
	$(BIN)/python benchmarks/core.py

# The wheel and the source distribution, with checks of what is in them.
dist: $(VENV)/.release
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

$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "foretune needs Python 3.11 or later; run: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
