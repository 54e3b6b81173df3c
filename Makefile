# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PLUGINS = $(sort $(wildcard plugins/*/*/pyproject.toml))
READY   = $(VENV)/.ready

.PHONY: setup demo test test-slow lint format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt $(PLUGINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[test]' $(foreach plugin,$(PLUGINS),--editable $(dir $(plugin)))
	touch $@

demo: setup
	mkdir -p build/demo
	$(BIN)/rpeg plan examples/ppo-llama-3.1-8b-32-gh200.yaml --output build/demo/plan.json
	$(BIN)/rpeg run build/demo/plan.json --backend simulator --trace build/demo/trace.jsonl

test: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup
	$(BIN)/pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build
