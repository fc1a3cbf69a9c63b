# nanotrn's commands; `make help` lists them. Each makes .venv first if that is missing or out of date, and
# everything stays inside this folder.

PYTHON ?= python3
CONFIG ?= configs/cpu.toml
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an interrupted set-up starts over; named after the Python, so that another one does too.
READY := $(VENV)/ready-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# No progress without bytes for so long, and so many tries: pip never hangs on an index out of reach.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --timeout 60 --retries 3 --constraint constraints.txt
TORCH := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --constraint constraints.txt torch

.PHONY: help setup train test lint clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@echo 'Options: make train CONFIG=configs/smoke.toml ARGS="--set run.dir=runs/try --set budget.seconds=60"'
	@echo '         make test JOBS=8 ARGS="-k config"     PYTHON=python3.12 make test'

train: $(READY)  ## train on the embedded text for 5 minutes and print the scores
	$(BIN)/python train.py --config $(CONFIG) $(ARGS)

test: $(READY)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(READY)  ## check the style
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

setup: $(READY)  ## only make .venv

clean:  ## remove .venv and what tools leave behind; runs/ and .cache/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Which torch? On Linux the public index has the CUDA build, several GB that a CPU does not need. So the CPU build
# is taken from where pip is told to look for files (find-links), else from torch's own index of CPU builds, and
# only if that is out of reach from the public index. Elsewhere the public index has the CPU build.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'make: $(PYTHON) not found: install Python 3.10 to 3.14, or name yours: PYTHON=python3.12 make ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "make: $$($(PYTHON) --version) will not do: Python 3.10 to 3.14 is needed; name one: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo 'make: $(PYTHON) can make no virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@if [ "$$(uname -s)" = Linux ]; then \
		$(TORCH) --no-index 2>/dev/null || \
		$(TORCH) --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 1 || \
		echo 'make: no CPU build of torch within reach: taking the one of the default index'; \
	fi
	$(PIP) --editable '.[test]'
	@touch $@
