# make help lists the commands. Nothing has to be installed or activated before: every command makes
# the virtual environment .venv when it is missing and keeps it up to date.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
LAB ?= lab1_ddp
JOBS ?=
LAB_ARGS ?=
PART ?=
PYTEST_ARGS ?=
FLAKE_ARGS ?=
SOAK_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
BOOK_ARGS ?=
REPORT_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Versions of packages that all of this was tested with; LOCK=/dev/null takes the newest.
LOCK ?= versions.txt
INSTALLED_FROM := pyproject.toml $(LOCK) $(wildcard lib/minidist/kernel/kernelspecs/*/kernel.json)

# nbgrader calls its tools by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The environment of another project must not leak into ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Without compiled files every kernel, rank and grader would compile the course anew.
unexport PYTHONDONTWRITEBYTECODE

# Much of what tests do is waiting: one process more than there are cores, and two in make test.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --numprocesses
IN_PART := $(addprefix tests/,$(PART))

.PHONY: help grade lab check test test-all test-rest flake verify soak nightly claims planner-report bench gpu book build lint clean install upgrade

help: ## list the commands
	@echo "make COMMAND   (PYTHON=/path/to/python chooses the Python >= 3.11 that .venv is made with)"
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' Makefile | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## /  \1   /p' Makefile

grade: $(VENV)/.installed ## grade the bundled example class of lab 1 (LAB=..., JOBS=...)
	@[ -e build/course.key ] || $(BIN)/python -m autograder init
	@$(BIN)/python -m autograder grade --example --lab $(LAB) $(if $(JOBS),--jobs $(JOBS))

lab: $(VENV)/.installed ## copy labs and lectures to work/ and open JupyterLab there (LAB_ARGS=--no-browser)
	@$(BIN)/python -m autograder.authoring.desk
	@args="$(LAB_ARGS)"; [ "$$(id -u)" != 0 ] || args="--allow-root $$args"; cd work; \
	  export JUPYTER_CONFIG_PATH="$(CURDIR)/autograder/authoring/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}"; \
	  exec "$(CURDIR)/$(BIN)/jupyter" lab $$args

test: $(VENV)/.installed-dev ## check style, types and built files, and run all tests but slow ones, in 10 minutes on two cores (PART=kernel)
	@$(PYTEST) $$(($(WORKERS) + 1)) -m "not slow" $(IN_PART) $(PYTEST_ARGS)

check: $(VENV)/.installed-dev ## check what has changed since the last commit: style, types and the tests nearest to it, in a minute
	@$(BIN)/python tests/helpers/check.py --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

test-all: test test-rest ## run every test but those marked nightly, in 40 minutes on two cores (PART=kernel)

test-rest: $(VENV)/.installed-dev # what 'make test' leaves out; a folder may have nothing of it
	@$(PYTEST) $(WORKERS) -m "slow and not nightly" $(IN_PART) $(PYTEST_ARGS) || [ $$? = 5 ]

flake: $(VENV)/.installed-dev ## run tests 30 times on a busy machine, in the background, and write a table (PART=kernel)
	@mkdir -p build/flake
	@nohup $(BIN)/python tests/helpers/flake.py $(FLAKE_ARGS) $(IN_PART) $(PYTEST_ARGS) >build/flake/log.txt 2>&1 & \
	  echo "in the background, process $$!; the table after each round: build/flake/table.md"

verify: $(VENV)/.installed-dev ## prove every lab's tests with right and wrong submissions (LAB=... for one)
	@$(BIN)/python -m autograder verify $(if $(filter command line environment,$(origin LAB)),--lab $(LAB)) --json build/verify.json

soak: $(VENV)/.installed-dev ## grade every right submission ten times with all cores busy (SOAK_ARGS=...)
	@$(BIN)/python tests/helpers/soak.py $(SOAK_ARGS)

nightly: $(VENV)/.installed-dev ## what takes long: tests marked `nightly`, 50 kills in a class of 200, the proof one by one and with other draws, references 20 times under load, every benchmark once (FAULTS=...)
	@$(BIN)/python tests/helpers/faults.py $(FAULTS)
	@$(BIN)/python -m autograder verify --alone
	@$(BIN)/python -m autograder verify --draws 20
	@$(BIN)/python tests/helpers/soak.py --only reference --times 20
	@SEEDS=100 $(PYTEST) $(WORKERS) -m nightly
	@$(BIN)/python benchmarks --quick
	@$(BIN)/python benchmarks/stock_graders.py --only hooks/ast_transformer

claims: $(VENV)/.installed ## run every lecture and list what it claims: verdict, kind, sources
	@mkdir -p build/claims build/lectures; rm -f build/claims/*.jsonl
	@for file in notebooks/[0-9]*.ipynb; do name="$$(basename "$$file" .ipynb)"; SECONDS=0; \
	  MINIDIST_CLAIMS="$(CURDIR)/build/claims/$$name.jsonl" MINIDIST_LECTURE="$$name" \
	  $(BIN)/python -m papermill --no-progress-bar --log-level ERROR --cwd build/lectures "$$file" "build/lectures/$$name.ipynb"; \
	  echo "$$name ran in $$SECONDS s"; done
	@$(BIN)/python -m minidist.claims build/claims/*.jsonl notebooks/claims.csv notebooks/[0-9]*.py

planner-report: $(VENV)/.installed ## every published run: what the planner predicts, and how far off it is (REPORT_ARGS=--short)
	@$(BIN)/python -m minidist report $(REPORT_ARGS)

bench: $(VENV)/.installed-dev ## time ours beside its peers, paired and interleaved (BENCH_ARGS=--quick)
	@$(BIN)/python benchmarks $(BENCH_ARGS)

# A GPU node is often without a network: there the Python that has torch for CUDA is taken as it is.
gpu: ## measure on this machine's NVIDIA GPUs, in at most 10 minutes, into benchmarks/results (GPU_ARGS=...)
	@for python in $(BIN)/python python3; do \
	  "$$python" -c "import sys, cloudpickle, numpy, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null \
	    && exec "$$python" benchmarks/gpu $(GPU_ARGS); \
	done; $(MAKE) --silent $(VENV)/.installed && $(BIN)/python benchmarks/gpu $(GPU_ARGS)

book: $(VENV)/.installed-dev ## run every lecture and write the course as a static site, build/book
	@$(BIN)/python book $(BOOK_ARGS)

build: $(VENV)/.installed ## write the notebooks anew from their .py sources
	@$(BIN)/python -m autograder.authoring

lint: $(VENV)/.installed-dev ## check style and types
	@$(BIN)/ruff format --check --quiet || { echo "run: $(VENV)/bin/ruff format"; exit 1; }
	@$(BIN)/ruff check --quiet
	@$(BIN)/pyright

# Keeps the course key, the journal and the gradebook: they cannot be made again.
clean: ## remove what can be made again, but neither .venv nor work/
	rm -rf build/class .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

install: $(VENV)/.installed ## install the course into .venv

$(VENV)/.installed: $(INSTALLED_FROM) | $(VENV)/bin/python
	@echo "Installing the course into $(VENV) (the first time this downloads PyTorch)"
	@$(PIP) install --constraint $(LOCK) --editable .
	@touch $@

$(VENV)/.installed-dev: $(INSTALLED_FROM) | $(VENV)/bin/python
	@echo "Installing the course and its test tools into $(VENV) (the first time this downloads PyTorch)"
	@$(PIP) install --constraint $(LOCK) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

upgrade: $(VENV)/bin/python ## write the newest versions of all packages to versions.txt; then run make test-all
	@rm -rf build/newest; $(BIN)/python -m venv build/newest
	@build/newest/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[dev]'
	@{ grep '^#' versions.txt; build/newest/bin/python tests/helpers/pinned.py; } >build/versions.txt
	@mv build/versions.txt versions.txt; rm -rf build/newest; git diff --stat -- versions.txt

$(VENV)/bin/python:
	@for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python; do \
	  [ -n "$$python" ] || continue; \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	  [ "$$python" != "$(PYTHON)" ] || { echo "PYTHON=$$python is not a Python >= 3.11" >&2; exit 1; }; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "No Python >= 3.11 was found. Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv)" >&2; \
	  echo "or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  version="$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; \
	  echo "$$found cannot make virtual environments: sudo apt-get install python$$version-venv" >&2; exit 1; \
	fi; \
	"$$found" -m venv $(VENV)
