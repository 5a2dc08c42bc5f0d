# hashnet: `make help` says what there is. VENV=PATH puts the environment (7 GB) elsewhere, so that clones can share one.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
EXTRA ?= cluster
VENV_DIR := $(abspath $(VENV))
BIN := $(VENV_DIR)/bin
# What was installed, by content, in the stamp's name: nothing is installed again while these files stay the same.
WANTED := $(EXTRA)-$(shell cat pyproject.toml constraints.txt .ci/setup | sha256sum | cut -c1-16)
STAMP := $(VENV_DIR)/.hashnet-$(WANTED)

# ARGS="tests/unit/index -x" runs a part. Without it, files side by side, those that start a Ray first.
PYTEST = "$(BIN)/python" -m pytest -q $(or $(ARGS),--numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder \
  tests/e2e tests/cluster tests/contract tests/unit hashnet cluster)

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export RAY_USAGE_STATS_ENABLED := 0

KNOWN := VENV PYTHON EXTRA ARGS RUN IMAGES OPEN
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
ifneq ($(filter-out $(KNOWN),$(GIVEN)),)
$(error make knows no variable $(filter-out $(KNOWN),$(GIVEN)); there are $(KNOWN), which `make help` explains)
endif

.PHONY: help setup demo test test-all test-cluster browser lint format cluster-demo scale bench peers audit clean
help:  ## this list
	@echo "hashnet: learned binary codes, trained and encoded on Ray, searched with FAISS"; echo
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "  VENV=PATH    where the environment lies (default .venv, 7 GB)"
	@echo "  PYTHON=CMD   the Python to make it with (default python3; 3.11 or newer)"
	@echo "  ARGS=WORDS   for make test, bench, scale and test-cluster: what to run, and its flags"
	@echo "  EXTRA=gpu    install FAISS for GPUs instead of faiss-cpu"
	@echo "  IMAGES=DIR   make demo on your own pictures: one folder per class, or all of them in DIR itself"
	@echo "  RUN=DIR      where make demo keeps its run (default runs/demo, with IMAGES runs/pictures)"
	@echo "  OPEN=1       make demo ends with the report and the search page in a browser"

setup: $(STAMP)  ## make the environment (done by the others when needed)
	@.ci/link "$(VENV_DIR)" "$(CURDIR)"

$(STAMP):
	@.ci/setup "$(PYTHON)" "$(VENV_DIR)" "$(EXTRA)" "$(STAMP)"

demo: setup  ## train, encode, index, evaluate, compare, query, report: on built-in digits, or on pictures of yours
	@"$(BIN)/python" jobs/demo.py run="$(abspath $(or $(RUN),runs/$(if $(IMAGES),pictures,demo)))" $(if $(IMAGES),images="$(IMAGES)") $(if $(filter 1 true yes,$(OPEN)),open=true) >/dev/null  # the result as JSON, for programs

test: setup  ## the tests that every change must pass (under ten minutes on two cores)
	@$(PYTEST)

test-all: setup browser lint  ## every test, the browser's and the slow ones too (an hour or so)
	@export HASHNET_REQUIRE_BROWSER=1; $(PYTEST) && "$(BIN)/python" -m pytest --slow -m slow -v -rs $(ARGS)  # these one by one

test-cluster: setup  ## all jobs, and faults, on hosts that share nothing: network namespaces, an S3 server (needs root)
	@"$(BIN)/python" -m pytest --slow -m hosts -v -rs $(or $(ARGS),tests/cluster/hosts)

browser:  ## install Chromium for the browser tests where it is missing (Debian's package)
	@command -v chromium chromium-browser google-chrome >/dev/null || { apt-get update -q && apt-get install -qy chromium; } \
	  || { echo "browser: no Chromium found and apt-get could not install one; install it and run again" >&2; exit 1; }

lint: setup  ## ruff and mypy
	@"$(BIN)/ruff" check . && "$(BIN)/ruff" format --check . && "$(BIN)/mypy"

format: setup  ## let ruff put the code into shape
	@"$(BIN)/ruff" check --fix . && "$(BIN)/ruff" format .

cluster-demo: setup  ## a real cluster of three Ray nodes on loopback, and the four jobs submitted to it
	@"$(BIN)/python" -m tests.support.cluster_demo "$(abspath $(or $(RUN),runs/cluster-demo))"

scale: setup  ## dress rehearsal: 1,281,167 pictures of 32 px through encode, index, evaluate (a quarter of an hour)
	@"$(BIN)/python" tests/bench/scale.py $(ARGS)

bench: setup  ## measure against peers (`make peers` installs them): JSON rows in .bench/, README.md, docs/
	@"$(BIN)/python" tests/bench/run.py $(ARGS)

peers: setup  ## install the engines that `make bench` compares with, into .bench/peers beside the environment (1 GB)
	@"$(BIN)/python" tests/bench/peers.py

audit:  ## look the pinned packages up for known vulnerabilities (needs the network)
	@"$(PYTHON)" -m venv "$(VENV_DIR)/audit" && "$(VENV_DIR)/audit/bin/pip" install --quiet pip-audit
	@"$(VENV_DIR)/audit/bin/pip-audit" --strict --disable-pip --no-deps -r constraints.txt

clean:  ## remove the environment and caches (runs stay)
	@rm -rf .venv .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
