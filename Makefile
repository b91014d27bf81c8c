# Daily commands; `make help` lists them. PYTHON chooses the interpreter, VENV the folder.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m-instruct
PORT ?= 8000
# All of them; or paths and options of pytest.
TESTS ?=
BIN := $(VENV)/bin
NATIVE := kernels/llmjax_kernels/native
# What an install is made from.
SOURCES := pyproject.toml hatch_build.py $(wildcard $(NATIVE)/src/*)

SAY_KERNELS := test -e $(NATIVE)/libllmjax_native.so || echo "The native CPU kernels were not \
built: XLA serves, several times slower. \`$(BIN)/pip install -v -e .\` says why."

PEERS ?= .venv-peers
PEERS_VLLM ?= .venv-vllm
GPU ?= .venv-gpu
GPU_PYTHON ?= python3.12

.DEFAULT_GOAL := help
.PHONY: help serve test sanitize lint types format notebook bench-compare gpu-check clean

help: ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@echo "Setting up $(VENV): packages and the native kernels, a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.run: $(SOURCES) | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable .
	@$(SAY_KERNELS)
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(SAY_KERNELS)
	@touch $@ $(VENV)/.run

serve: $(VENV)/.run ## Set up, fetch the demo model, serve it on PORT (8000)
	@$(BIN)/llmjax pull $(MODEL)
	@exec $(BIN)/llmjax serve --model $(MODEL) --port $(PORT)

test: $(VENV)/.dev ## Set up and pass the tests
	$(BIN)/python -m pytest -n logical --dist loadfile $(TESTS)

# Python is not built for the sanitizer: its run-time must be there first.
SANITIZED := LLMJAX_SANITIZED=build/sanitize/libllmjax_native.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)"

sanitize: $(VENV)/.dev ## Test the native kernels with address and undefined behaviour checks (GCC)
	CXXFLAGS="-O1 -g1 -w -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
		$(BIN)/python hatch_build.py build/sanitize
	$(SANITIZED) $(BIN)/python -m pytest --capture=no -m every_isa tests/kernels
	for isa in avx512 generic; do \
		$(SANITIZED) LLMJAX_ISA=$$isa $(BIN)/python -m pytest --capture=no tests/kernels/test_bounds.py || exit 1; \
	done

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

# Built for all that the CPU has; but its AMX code crashed on the machines with AMX that were tried.
LLAMACPP_CMAKE := $(if $(shell grep -m 1 -o amx_tile /proc/cpuinfo 2>/dev/null),-DGGML_NATIVE=OFF \
	-DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON)

$(PEERS)/.done: docs/benchmarks/sides/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	CMAKE_ARGS="$(LLAMACPP_CMAKE)" $(PEERS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

$(PEERS_VLLM)/.done: docs/benchmarks/sides/install_vllm.sh docs/benchmarks/sides/vllm-requirements.txt
	$(PYTHON) -m venv $(PEERS_VLLM)
	sh $< $(PEERS_VLLM)/bin/python
	@touch $@

bench-compare: $(VENV)/.dev $(PEERS)/.done $(if $(VLLM),$(PEERS_VLLM)/.done) ## Measure beside llama.cpp (VLLM=1: and vLLM; AMX=no: without), into docs/benchmarks
	$(BIN)/python docs/benchmarks/compare.py --peers-python $(PEERS)/bin/python \
	    $(if $(VLLM),--vllm-python $(PEERS_VLLM)/bin/python) $(if $(MACHINE),--machine '$(MACHINE)') \
	    $(if $(filter no,$(AMX)),--without-amx)

# Without the CUDA libraries that the plugins ask for (5 GB): nothing calls them.
$(GPU)/.done: tests/gpu/requirements.txt tests/gpu/requirements-no-deps.txt
	$(GPU_PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --requirement $<
	$(GPU)/bin/python -m pip install --quiet --no-deps --requirement tests/gpu/requirements-no-deps.txt
	@touch $@

gpu-check: $(GPU)/.done ## Compile kernels and steps for NVIDIA GPUs, which need not be here (Python 3.12)
	PYTHONPATH=.:kernels:serving $(GPU)/bin/python tests/gpu/check.py

clean: ## Remove what the commands above made
	rm -rf $(VENV) $(GPU) $(NATIVE)/*.so build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
