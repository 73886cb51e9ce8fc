# make demo   fetch a real model, fine-tune it on a 4-bit base, export, check, compare, answer a question
# make test   the default tests      make test-slow   effects on the real model      make check   ruff, mypy, import contracts
# make bench  every benchmark in its quick form
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow check bench
demo: .venv/ready
	$(BIN)/karui demo

test: .venv/ready
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile

test-slow: .venv/ready
	$(BIN)/pytest -m "slow and not gpu and not peer"

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	for script in benchmarks/*.py; do $(BIN)/python $$script --quick || exit 1; done

# --no-compile: most of the packages' modules are never imported
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e ".[test,serve]"
	touch $@
