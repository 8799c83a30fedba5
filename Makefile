# Everything a fresh machine needs: Linux, python3 >= 3.11 with venv, make, and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(sort $(wildcard pool/*.py client/*.py client/*/*.py service/*.py service/*/*.py))

SOAK ?= 30s
FUZZ ?= 30s

# Where bytecode is not kept, every process that a test starts compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE
# Two more than there are cores: tests wait for processes, sockets and clocks.
JOBS ?= $(shell expr $$(nproc) + 2)

.PHONY: demo test test-heavy test-docker soak fuzz faults groups peers bench check format install clean force
.DEFAULT_GOAL := install

demo: install  ## Daemon, 4 schedulers and a real trace, in a temporary directory
	$(BIN)/python examples/demo.py

test: install  ## Every test that this machine can run
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-heavy: install  ## In full size what make test runs small, and what takes seconds of processor each
	$(BIN)/python -m pytest -n $(JOBS) -m heavy

test-docker: install  ## In containers: a Docker engine and images of its own, from nothing installed. As root
	PYTHON=$(BIN)/python tests/docker/run

soak: install  ## Random kills under load; SOAK=10m for longer
	$(BIN)/python tests/faults/soak.py --seconds $(SOAK)

fuzz: install  ## Everything but what a daemon expects, at least 100,000 messages; FUZZ=10m for longer
	$(BIN)/python tests/faults/fuzz.py --seconds $(FUZZ) --messages 100000

faults: install  ## A crash before every store, each with a crash at every store of the recovery
	$(BIN)/python -m pytest -n $(JOBS) -m 'heavy or not heavy' tests/faults --timeout 3600

groups: install  ## Ranks over dying allocators, and beside a rival, in full size
	$(BIN)/python -m pytest -n $(JOBS) -m 'heavy or not heavy' tests/faults/test_group_restarts.py tests/faults/test_group_limbo.py

peers: $(VENV)/peers  ## SGLang's own callers over this allocator, and a real Mamba-2 model; MUTANTS=1: wrong ones, too
	$(BIN)/python tests/peers/run_callers.py
	$(BIN)/python -m pytest tests/peers

bench: install  ## Every figure of the README; BENCH=--quick for a short look, BENCH='--goal 7' for one
	$(BIN)/mambapool bench $(BENCH)

check: install  ## Lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p mambapool.pool -p mambapool.service -p mambapool.client
	$(BIN)/mypy --explicit-package-bases tests examples bench

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/installed

# The strict editable install links each file: it is made again when files come or go, not when they change.
$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/sources
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,dev]'
	touch $@

$(VENV)/peers: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,dev,peers]'
	touch $@

$(VENV)/sources: force
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '$(SOURCES)' | cmp -s - $@ || echo '$(SOURCES)' > $@

force:

clean:
	rm -rf $(VENV) build dist docker/wheels/*.whl *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
