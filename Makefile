# People and CI run the same targets. `make test` needs Python 3.11 or newer, make and git: it makes its own .venv.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

# An active environment, or paths set for another project, must not reach into this one.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
# Nothing calls out behind the user's back.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help install $(VENV) test test-federation federation check format bench tables demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with all extras and the tools (automatic where needed)

$(VENV): $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "Making $(VENV) with $(PYTHON) ..."; \
		"$(PYTHON)" -m venv --clear $(VENV); }
	@echo "Installing the build tools ..."
	@$(PIP) hatchling editables
	@echo "Installing comfetch with all extras (some minutes the first time) ..."
	@$(PIP) --no-build-isolation --editable '.[all,dev]'
	@touch $@
	@echo "Installed in $(VENV)."

# One thread a worker: the workers already share the cores.
test: $(STAMP) ## run all tests and doctests; ARGS="tests/unit -k hash" picks, WORKERS=0 runs in one process
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

# Two files at a time: most of it is waiting, for nodes to be missed and for processes to start.
# Left out: 100 million parameters under a memory limit, which benchmarks.federation records, and ends of the example script.
test-federation: $(STAMP) ## run the tests with real SuperLinks, SuperNodes and Ray on loopback; ARGS="-m slow" runs the rest
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/federation -m "not slow" --numprocesses $(WORKERS) --dist loadfile --durations 20 $(ARGS)

federation: $(STAMP) ## start a SuperLink with TLS and four authenticated SuperNodes on this machine, and run some rounds
	@$(BIN)/python examples/federation.py $(ARGS)

check: $(STAMP) ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP) ## format the code and sort its imports
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure layers against their full twins, and the driver against a bare loop (and pfl, if installed)
	@$(BIN)/python -m benchmarks.layers $(ARGS); layers=$$?; $(BIN)/python -m benchmarks.driver && exit $$layers

tables: $(STAMP) ## write the tables of README and docs anew from the committed records
	@$(BIN)/python -m benchmarks.tables $(ARGS)

demo: $(STAMP) ## train digits federatedly with FedAvg and Comfetch: table and picture in runs/demo
	@$(BIN)/comfetch demo $(ARGS)

clean: ## remove .venv, caches and build artefacts (runs/ stays)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
