# `make demo` and `make test` do all the set-up on a fresh machine. Override PYTHON to choose the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One torch thread per test process; the tests run on two.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test long check lint types format bench clean
.DEFAULT_GOAL := check

$(STAMP): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --editable '.[dev,lora,gym]'
	touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py

test: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest -n 2 -m "not (gpu or chaos or soak or browser or vllm)"

long: $(STAMP)
	$(TEST_ENV) timeout 1200 $(BIN)/pytest -m "chaos or soak or browser"; code=$$?; [ $$code -eq 5 ] && exit 0 || exit $$code

lint: $(STAMP)
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test long

clean:
	rm -rf $(VENV) build dist runs
