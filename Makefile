# Needs Python 3.10 or newer, with its venv module, and nothing else installed beforehand.
#
#   make demo    install, fetch SmolLM2, and write the demonstration page to demo-out/
#   make test    install, lint, type-check, and run all tests, also against TransformerLens 3.9
#
# PYTHON chooses the interpreter; PIP_ARGS is passed to every pip install (another index, for instance).

PYTHON ?= python3
PIP_ARGS ?=
OUT ?= demo-out
# Test files that run at once, each on one thread; a process takes about 2 GiB.
JOBS ?= 2

VENV := .venv
VENV_TL3 := .venv-tl3
BIN := $(VENV)/bin
# Compiling all of torch to bytecode takes longer than compiling what is used on first import.
PIP := -m pip install -q --no-compile --disable-pip-version-check $(PIP_ARGS)

# Recipes of these targets share the two environments: one at a time.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench get clean

help:
	@sed -n '/^#   make/s/^# *//p' Makefile

demo: get
	$(BIN)/mechheads demo --out $(OUT)

test: $(VENV)/.dev lint $(VENV_TL3)/.dev
	$(BIN)/mechheads get smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not tl3" -n $(JOBS) --dist loadfile
	$(VENV_TL3)/bin/python -m pytest -m tl3

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.dev
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

get: $(VENV)/.run
	$(BIN)/mechheads get smollm2

clean:
	rm -rf $(VENV) $(VENV_TL3) demo-out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# Stamps: an environment is installed again only when what it is made from has changed.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python $(PIP) -c constraints.txt -e ".[dev,notebook]"
	@touch $@

$(VENV_TL3)/.dev: pyproject.toml constraints-tl3.txt
	@test -x $(VENV_TL3)/bin/python || $(PYTHON) -m venv $(VENV_TL3)
	@echo "installing into $(VENV_TL3) (a few minutes the first time)"
	$(VENV_TL3)/bin/python $(PIP) -c constraints-tl3.txt -e . pytest hypothesis beartype
	@touch $@
