# make demo: train a small network on handwritten digits and open up what it is. make test: everything that is checked.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/multilinear demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# a process for each core, up to four, and one thread in each: more would wait for each other
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' -n auto --maxprocesses 4 --dist worksteal

clean:
	rm -rf $(VENV) demo runs .pytest_cache .mypy_cache .ruff_cache
