# The one door. `make demo` shows the product, `make test` proves it; both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help install demo test chaos check format bench clean

help:
	@echo "make demo     install into $(VENV) and show the main job"
	@echo "make test     install and run every test"
	@echo "make chaos    break things for real, for longer: kills, fuzzing, full disks"
	@echo "make check    format, lint, types, import contract"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make bench    the long measurements; result tables go to benchmarks/results"
	@echo "make clean    remove $(VENV) and what was built"

install: $(STAMP)

# torch comes first and pinned: any other package's open range would pull in a CUDA build of several GB.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) install --constraint constraints.txt torch==2.13.0
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: install
	@DEEPVM=$(BIN)/deepvm sh examples/demo.sh

test: install
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

chaos: install
	@$(BIN)/python -m pytest -m chaos --numprocesses 2 --dist worksteal

check: install
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix --quiet .

bench: install
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
