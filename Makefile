# Two commands from a fresh clone: `make quickstart` and `make test`. Both set up .venv first where it is missing.
# The first interpreter that really runs and is of a version the dependencies support; name another with PYTHON=…
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p -c "$(IN_RANGE)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: quickstart test lint setup clean

quickstart: setup
	$(RUN) -m experiments.run +exp=quickstart

test: setup
	$(RUN) -m pytest

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

setup: $(VENV)/.installed

# Exact versions come from constraints.txt; the marker file is written only after everything was installed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: expected Python 3.11 to 3.13 on the PATH, found none; name one with: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV)
