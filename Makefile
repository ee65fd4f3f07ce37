# Slackwater: `make` lists what there is. Everything lives in this folder (.venv, .venv-sglang, build).
#
# Variables, given as `make test TORCH_INDEX=URL`:
#   PYTHON       the interpreter that makes the environments (3.11 or newer)
#   TORCH        the torch to install; a plain pin takes a CUDA build on most machines
#   TORCH_INDEX  package index for torch alone (pip's own configuration when empty); give a CPU index
#                there to save several GB
#   ROLLOUT      sglang (the real server) or reference (a small torch model behind the same endpoints)
#   PYTEST_ARGS  more arguments for pytest, for check, test and soak

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ROLLOUT ?= sglang
PYTEST_ARGS ?=

VENV := .venv
SGLANG_VENV := .venv-sglang
STEP = $(PYTHON) requirements/step.py
PIP_OPTIONS := --disable-pip-version-check --no-input
TORCH_OPTIONS = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# An environment is finished when it holds the stamp named by the checksum of what it was made from, so a
# second run does nothing, whatever git did to the files' times.
job_key := $(shell { echo '$(TORCH)'; cat requirements/job.lock; } | cksum | tr ' ' '-')
sglang_key := $(shell { echo '$(TORCH)'; cat requirements/sglang*.txt 2>/dev/null; } | cksum | tr ' ' '-')
# Strict editable mode links file by file: the package is installed again when a file comes or goes.
package_key := $(shell { find engine backends adapters -name '*.py' -o -name 'py.typed' | LC_ALL=C sort; cat pyproject.toml; } | cksum | tr ' ' '-')
JOB_STAMP := $(VENV)/.job-$(job_key)
PACKAGE_STAMP := $(VENV)/.package-$(job_key)-$(package_key)
SGLANG_STAMP := $(SGLANG_VENV)/.sglang-$(sglang_key)

# With ROLLOUT=reference nothing needs SGLang's environment; its tests say that they were left out.
SGLANG_ENV := $(if $(filter reference,$(ROLLOUT)),,sglang-env)

# What each test run takes: see "Markers" in CONTRIBUTING.md.
CHECK_TESTS := not real and not sglang and not etcd34 and not alone and not soak
BESIDE_TESTS := not sglang and not alone and not soak
ALONE_TESTS := (sglang or alone) and not soak
TEST_WORKERS ?= 2

# One thread a process: two trainers and their servers share the cores that there are.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help python env sglang-env demo check lint types test soak lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Slackwater needs Python 3.11 or newer; say where it is: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }

env: $(PACKAGE_STAMP)  ## make .venv: torch, the locked packages, Slackwater itself (editable)

$(JOB_STAMP): | python
	@echo "[job] environment in $(VENV): a few minutes, once"
	@test -x $(VENV)/bin/pip || $(STEP) "[job] create $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(STEP) "[job] install $(TORCH)" $(VENV)/bin/pip install $(PIP_OPTIONS) $(TORCH_OPTIONS) --no-deps '$(TORCH)'
	@$(STEP) "[job] install requirements/job.lock" $(VENV)/bin/pip install $(PIP_OPTIONS) --require-hashes --no-deps -r requirements/job.lock
	@rm -f $(VENV)/.job-* && touch $@

$(PACKAGE_STAMP): $(JOB_STAMP)
	@$(STEP) "[job] install slackwater (editable)" $(VENV)/bin/pip install $(PIP_OPTIONS) --no-deps --no-build-isolation --config-settings editable_mode=strict -e .
	@rm -f $(VENV)/.package-* && touch $@

sglang-env: $(SGLANG_STAMP)  ## make .venv-sglang: the real SGLang server, on CPU

$(SGLANG_STAMP): | python
	@echo "[sglang] environment in $(SGLANG_VENV): about five minutes, once"
	@test -x $(SGLANG_VENV)/bin/pip || $(STEP) "[sglang] create $(SGLANG_VENV)" $(PYTHON) -m venv $(SGLANG_VENV)
	@$(STEP) "[sglang] install $(TORCH)" $(SGLANG_VENV)/bin/pip install $(PIP_OPTIONS) $(TORCH_OPTIONS) --no-deps '$(TORCH)'
	@$(STEP) "[sglang] install its requirements" $(SGLANG_VENV)/bin/pip install $(PIP_OPTIONS) '$(TORCH)' -r requirements/sglang.txt
	@$(STEP) "[sglang] install the server" $(SGLANG_VENV)/bin/pip install $(PIP_OPTIONS) --no-deps -r requirements/sglang-nodeps.txt
	@rm -f $(SGLANG_VENV)/.sglang-* && touch $@

demo: env $(SGLANG_ENV)  ## the main job: trains, is killed three times, heals (ROLLOUT=reference: without SGLang)
	$(VENV)/bin/python -m examples.demo --rollout $(ROLLOUT)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: env
	$(VENV)/bin/mypy

check: lint types  ## the quick inner loop: lint, types, unit tests (<= 60 s)
	$(VENV)/bin/pytest -q -m '$(CHECK_TESTS)' $(PYTEST_ARGS)

# Two runs: what may share the machine runs side by side, one file a worker; what needs it to itself runs
# after that, also when the first run failed (but not when it was interrupted, pytest's 2). A second run with
# nothing in it (5) is no failure. The trap lets pytest finish its own clean-up after Ctrl-C.
test: env $(SGLANG_ENV) lint types  ## everything but soak, the real SGLang included
	@trap : INT; failed=0; \
	$(VENV)/bin/pytest -n $(TEST_WORKERS) --dist loadfile -m '$(BESIDE_TESTS)' $(PYTEST_ARGS) || failed=$$?; \
	[ $$failed = 2 ] || $(VENV)/bin/pytest -m '$(ALONE_TESTS)' $(PYTEST_ARGS) || { code=$$?; [ $$code = 5 ] || failed=$$code; }; \
	exit $$failed

soak: env $(SGLANG_ENV)  ## the long runs that no one waits for
	$(VENV)/bin/pytest -m soak $(PYTEST_ARGS)

LOCK_TOOL := .venv-lock/bin/uv
LOCK = $(LOCK_TOOL) pip compile -q pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header

lock: | python  ## write requirements/job.lock and core.lock anew
	@test -x $(LOCK_TOOL) || { $(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install -q $(PIP_OPTIONS) uv; }
	$(LOCK) --extra dev -c requirements/constraints.txt -o .venv-lock/job.lock --upgrade
	$(LOCK) -c .venv-lock/job.lock -o .venv-lock/core.lock --upgrade
	@# torch is installed by its own line, with or without CUDA: neither it nor its GPU parts belong in the lock
	@{ echo '# Written by `make lock`: everything of [dev] except torch. Install torch first, then: pip install --require-hashes --no-deps -r'; \
	   awk '/^[a-z]/ { keep = !/^(torch|triton|cuda-[a-z]*|nvidia-[a-z0-9-]*)(==|\[)/ } keep' .venv-lock/job.lock; } > requirements/job.lock
	@{ echo '# Written by `make lock`: what the coordinator, the command line and the sidecar need (no torch).'; \
	   cat .venv-lock/core.lock; } > requirements/core.lock

clean:  ## remove the environments, builds and caches
	rm -rf $(VENV) $(SGLANG_VENV) .venv-lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
