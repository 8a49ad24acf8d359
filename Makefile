# The one door. `make demo` shows the product, `make test` proves it; both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEWEST := .venv-newest
PIP := python -m pip --disable-pip-version-check --quiet install

.PHONY: help install pins newest demo test chaos check format mutate bench clean

help:
	@echo "make demo     install into $(VENV) and show the main job"
	@echo "make test     install, run the tests, and print the share of statements and branches that ran"
	@echo "make chaos    break things for real, for longer: kills, fuzzing, full disks"
	@echo "make check    format, lint, types, import contract"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make mutate   put small faults into a copy of src; list those that no test notices (SEED=1 COUNT=300 JOBS=2)"
	@echo "make pins     pin the newest of every development package in constraints.txt"
	@echo "make newest   try the newest of every package in $(NEWEST), and say what broke"
	@echo "make bench    the long measurements; result tables go to benchmarks/results"
	@echo "make clean    remove $(VENV) and what was built"

install: $(STAMP)

# torch comes first and pinned: any other package's open range would pull in a CUDA build of several GB.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/$(PIP) --constraint constraints.txt torch hatchling editables
	@$(BIN)/$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $(STAMP)

pins: install
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-annotate --upgrade \
		--custom-compile-command "make pins" --output-file constraints.txt pyproject.toml tools/pins.in
	@git --no-pager diff --stat constraints.txt

newest:
	@$(PYTHON) -m venv --clear $(NEWEST)
	@echo "installing into $(NEWEST)"
	@$(NEWEST)/bin/$(PIP) --constraint tools/pins.in torch hatchling editables
	@$(NEWEST)/bin/$(PIP) --constraint tools/pins.in --no-build-isolation --editable '.[dev]'
	@touch $(NEWEST)/.installed
	@$(NEWEST)/bin/python -m tools.newest $(NEWEST)

demo: install
	@DEEPVM=$(BIN)/deepvm sh examples/demo.sh

test: install
	@$(BIN)/python -m tools.coverage $(BIN)/python -m pytest --numprocesses 4 --dist worksteal

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

mutate: install
	@$(BIN)/python -m tools.mutate

bench: install
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(NEWEST) .mutate .hits build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
