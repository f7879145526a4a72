# `make quickstart` and `make test` do all set-up by themselves.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python >= 3.12 among the usual names and pyenv's versions.
PYTHON := $(shell for p in python3.12 python3.13 python3.14 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$p"; break; }; done)
UV := $(shell command -v uv 2>/dev/null)
ARGS ?=
NAME ?=

.PHONY: help setup quickstart test check format bench lock clean
help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP) ## the environment, from the lock
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.12 found"; echo "hint: install one (Debian 13: apt-get install python3 python3-venv; pyenv install 3.12)"; exit 1; }
ifneq ($(UV),)
	$(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
else
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
endif
	@touch $@
	@$(BIN)/sao doctor | grep -v '^ok' || true

quickstart: setup ## the main job: train a tiny coding agent, about four minutes on two cores
	$(BIN)/sao train configs/quickstart.toml $(ARGS)

test: setup ## all tests; real Docker and two gloo ranks included
	$(BIN)/python -m pytest $(ARGS)

check: setup ## lint, format, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_size.py

format: setup ## rewrite files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## all benchmarks, or one: make bench NAME=gae_8
	$(BIN)/python -m benchmarks $(NAME)

lock: ## compile requirements.lock anew (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --python-version 3.12 --generate-hashes \
		--no-emit-index-url --no-header --quiet --output-file requirements.lock

clean: ## remove what dead runs left
	$(BIN)/sao clean
