# Daily commands; `make help` lists them. PYTHON chooses the interpreter, VENV the folder.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m-instruct
PORT ?= 8000
BIN := $(VENV)/bin
PEERS ?= .venv-peers
PEERS_VLLM ?= .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help serve test lint types format notebook bench-compare clean

help: ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.run

serve: $(VENV)/.run ## Set up, fetch the demo model, serve it on PORT (8000)
	@$(BIN)/llmjax pull $(MODEL)
	@exec $(BIN)/llmjax serve --model $(MODEL) --port $(PORT)

test: $(VENV)/.dev ## Set up and pass the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.dev ## Style and the import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev ## Static types
	$(BIN)/mypy

format: $(VENV)/.dev ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebook: $(VENV)/.run ## Open the notebooks
	$(BIN)/python -m pip install --quiet --editable '.[notebook]'
	$(BIN)/jupyter lab notebooks

$(PEERS)/.done: docs/benchmarks/sides/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

$(PEERS_VLLM)/.done: docs/benchmarks/sides/install_vllm.sh docs/benchmarks/sides/vllm-requirements.txt
	$(PYTHON) -m venv $(PEERS_VLLM)
	sh $< $(PEERS_VLLM)/bin/python
	@touch $@

bench-compare: $(VENV)/.dev $(PEERS)/.done $(if $(VLLM),$(PEERS_VLLM)/.done) ## Measure beside llama.cpp (VLLM=1: and vLLM), into docs/benchmarks
	$(BIN)/python docs/benchmarks/compare.py --peers-python $(PEERS)/bin/python \
	    $(if $(VLLM),--vllm-python $(PEERS_VLLM)/bin/python) $(if $(MACHINE),--machine '$(MACHINE)')

clean: ## Remove what the commands above made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
