# Everything runs in .venv, which is made anew when the requirements change.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-slow lint clean

quickstart: .venv/ready
	$(BIN)/python tools/quickstart.py

test: .venv/ready-dev lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: .venv/ready-dev
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv data runs
