# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: coverage install demo lint types test test-full clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: install
	$(BIN)/intarsia demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2 --dist loadfile -m "not full and not gpu"

test-full: install
	$(BIN)/pytest -n 2 --dist worksteal

# Hours on one core: every OpInfo sample on every engine. `make coverage JOBS=8` on a larger machine.
JOBS ?= 2
coverage: install
	$(BIN)/python -m tests.convert.coverage --jobs $(JOBS) > docs/coverage.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
