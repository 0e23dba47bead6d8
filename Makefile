# `make` lists the targets. Each builds .venv under constraints.txt when there is none, or when pyproject.toml or constraints.txt is newer than it.
# Another environment, used as it is: make test PY=python3

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
# a PY from the command line is not ours to build or to change
READY := $(if $(filter command line,$(origin PY)),,$(STAMP))

# torch takes every core by default and slows down on a shared machine
export OMP_NUM_THREADS ?= 2
# the tests begin some dozens of processes, and each would compile all modules anew
export PYTHONDONTWRITEBYTECODE :=

PIP := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test test-all models aot zoo lint gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY)  ## train a small masked model on the CPU and print its report
	@$(PY) examples/demo.py

# in two processes, whose threads would be in each other's way; in one where pytest-xdist is not there. More: make test JOBS=8
JOBS ?= 2
SIDE_BY_SIDE = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder || echo $(PY) -m pytest)

test: $(READY)  ## the tests, but for the slow ones; JOBS=8 on more cores
	@$(SIDE_BY_SIDE) -m "not slow and not gpu and not models"

test-all: $(READY)  ## the tests, slow ones included
	@$(SIDE_BY_SIDE) -m "not gpu and not models"

models: $(READY)  ## the tests with models of timm, Hugging Face and peft, which it installs
	@$(PIP) --no-build-isolation --editable '.[dev,examples,models]'
	@$(PY) -m pytest tests/models tests/recipes tests/works/test_onnx.py -m "not gpu"

zoo: $(READY)  ## hundreds of models of torchvision, timm and Hugging Face, a row each; hours, resumable; ARGS="--only 'resnet*'"
	@$(PIP) --no-build-isolation --editable '.[dev,examples,models]'
	@$(PY) examples/zoo/run.py $(ARGS)

# with another Triton: make aot AOT_PYTHON=/path/to/python; fewer: make aot AOT_ARGS="--arch 90 --only forward"
aot: $(if $(AOT_PYTHON),,$(READY))  ## compile the kernels for sm_80, sm_90 and sm_100, without a GPU, and check what came out
	@PYTHONPATH=. $(or $(AOT_PYTHON),$(PY)) tests/aot $(AOT_ARGS)

lint: $(READY)  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

gpu: $(READY)  ## tests and benchmarks on a CUDA device, stage by stage; ARGS="--stages tests,quick --out DIR"
	@$(PY) -m fxmask.bench.gpu $(ARGS)

clean:  ## remove builds and caches; .venv stays
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools first, because the project is then built without isolation, under the same pins. torch before the rest, so that nothing pulls in another build of it.
# `python -m venv` on a venv that is there completes it and keeps what is installed.
$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV): the first time takes some minutes"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools wheel torch
	@$(PIP) --no-build-isolation --editable '.[dev,examples]'
	@touch $@
