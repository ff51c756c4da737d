# Everything a newcomer runs. Needs GNU make, Python >= 3.10 with venv, and plain pip.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.kvgraft-setup

TORCH  := torch==2.13.0
# what kvgraft-s3 is built on needs Python 3.11
TOONEW := $(shell $(PYTHON) -c 'import sys; print("plugins/s3" if sys.version_info < (3, 11) else "")')
DISTS  := core $(filter-out $(TOONEW),$(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))))
EXTRAS := './plugins/mooncake[cpu]' './plugins/transformers[serve]'
BUILD  := 'hatchling>=1.27' editables
TOOLS  := pytest hypothesis pytest-xdist pytest-timeout ruff mypy httpx openai 'moto[server]'
PIP    := $(PY) -m pip --disable-pip-version-check
# worksteal: each process keeps to its part of the tests, and helps where the other is behind
PYTEST_ARGS ?= -n 2 --dist worksteal
STEPS  ?= 1000000

.DEFAULT_GOAL := help
.PHONY: help setup demo test check long fuzz mutants nightly docs bench build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## create .venv and install every distribution, editable, with the tools

$(STAMP): Makefile constraints.txt $(DISTS:=/pyproject.toml)
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt $(BUILD) $(TOOLS)
	$(PIP) install -c constraints.txt --no-build-isolation $(addprefix -e ./,$(DISTS)) $(addprefix -e ,$(EXTRAS))
	@touch $@

demo: setup ## run the demonstration
	$(VENV)/bin/python examples/demo.py

test: setup ## run the tests, except the long ones
	$(PY) -m pytest -m 'not long' $(PYTEST_ARGS)

long: setup ## run the long tests, each named as it ends
	$(PY) -m pytest -m long -v $(PYTEST_ARGS)

check: setup ## format, lint and types, changing nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

fuzz: setup ## random operations against the model; STEPS=1000000
	KVGRAFT_FUZZ_STEPS=$(STEPS) $(PY) -m pytest tests/model/test_state_machine.py $(PYTEST_ARGS) \
	  -p no:cacheprovider --hypothesis-profile=fuzz --timeout=0 -o faulthandler_timeout=0

mutants: setup ## known-bad components and cores against the contract suite; prints the kill table
	$(PY) -m tests.mutants.table
	$(PY) -m tests.mutants.under_guard

nightly: setup ## run long, fuzz and mutants, all three whatever fails; takes hours
	@failed=; for part in long fuzz mutants; do echo "== make $$part"; \
	  $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

docs: setup ## write what is generated in docs/ and the README
	$(PY) docs/generate.py

bench: setup ## run every script in benchmarks/
	@set -e; for script in $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(PY) $$script; done

build: setup ## build the wheels into dist/
	$(PIP) wheel --no-deps --no-build-isolation -w dist $(addprefix ./,$(DISTS))

clean: ## remove build output and caches; .venv stays
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find core plugins tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
