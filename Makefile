# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: coverage docs fuzz install demo lint models types test pytest test-slow test-full clean

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

# Style and types are checked beside the tests: each runs on one core, and the tests wait for processes at times.
test: install
	$(MAKE) --no-print-directory --jobs 3 lint types pytest

# Two workers on two cores: a third would import all tests once more, and processes that tests start use what is
# idle. A thread each, or pools would spin.
# Bytecode is written even where the environment forbids it: each of a hundred processes would compile every file.
# A worker that has finished takes tests from the end of the other's list, so both end together.
PYTEST := env --unset PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 60

pytest: install
	$(PYTEST) -m "not slow and not full and not gpu"

# The tests marked `slow`: they take seconds each. Continuous integration runs them after the others.
test-slow: install
	$(PYTEST) -m "slow and not full and not gpu"

test-full: install
	$(PYTEST) --timeout 7200

# All samples of every operator on every engine, and its edges, in an hour; stopped and started again, it goes on where it was.
coverage: DTYPES := float32 float16 bfloat16 int32 int64 bool
coverage: install
	$(BIN)/python -m tests.convert.edges --samples 4 --keep .edges.json
	$(BIN)/python -m tests.convert.coverage $(DTYPES:%=--all %) --core 0 --jobs 2 \
		--keep .coverage.json --edges .edges.json > docs/coverage.md

# The documentation site, into site/; a warning is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Random models against eager PyTorch; stopped and started again, it goes on where it was.
fuzz: install
	$(BIN)/python -m tests.fuzz --models 10000 --jobs 2 --state .fuzz.jsonl

# Models of timm, torchvision and Hugging Face against eager PyTorch, into docs/models.md; it goes on where it was.
models: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[models]"
	$(BIN)/python -m tests.models.outside --docs

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz.jsonl .models.jsonl .edges.json .coverage.json
