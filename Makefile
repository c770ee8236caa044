# Two commands do all the set-up from nothing: `make audit` runs a first audit, `make test` the tests.
VENV ?= .venv
PYTHON ?= python3
PORT ?= 8000 # of docs-serve
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt

export FLWR_TELEMETRY_ENABLED = 0

.PHONY: audit test lint format docs docs-serve wheel-test clean

audit: $(VENV)/.installed
	$(BIN)/gradveil audit

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist loadscope

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# search needs a server: browsers refuse it to pages that are opened from disk
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site $(PORT)

# wheel and sdist, each in an environment of its own and away from the source tree
wheel-test: $(BIN)/python
	$(BIN)/python benchmarks/faults/install.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that no other package pulls in a newer one with its CUDA packages
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site
