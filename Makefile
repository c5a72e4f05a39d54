# Everything on a fresh clone, with only make and Python 3.11 or later:
#     make demo     a first sweep on the machine at hand, and dispatch's answer
#     make install  the virtual environment that all below need
#     make test     the core of the tests: minutes, and every module
#     make test-all the rest of the tests
#     make oldest   the tests of compiled code with the lowest torch of pyproject.toml
#     make docs     docs/ as HTML, into build/docs
#     make lint types bench wheel clean
# Overrides:
#     PYTHON=python3.12      makes the virtual environment
#     VENV=folder            the virtual environment; one that exists is used as it is
#     TORCH=2.12.0           another torch than constraints.txt names
#     JOBS=4                 processes that test
#     ARGS="-k store"        for pytest
#     PART=2/4               of test-all: the second of four parts; of test: this part, too
#     SLOW=1/2               of test: of its slow tests the first of two parts only

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
JOBS ?= auto
ARGS ?=
PART ?=
SLOW ?=
OLDEST := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)

BIN := $(VENV)/bin
# What is installed, for which torch; as old as the file that says what to install.
FOR_DEMO := $(VENV)/.installed-demo-$(TORCH)
FOR_DEV := $(VENV)/.installed-dev-$(TORCH)
FOR_DOCS := $(VENV)/.installed-docs-$(TORCH)

# Tests start some 200 processes: each would compile torch's Python, 6 s where it imports dynamo.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo install test test-all oldest lint types bench wheel docs clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ---- what the demo runs ----
DEMO_DB := build/demo.sqlite

demo: $(FOR_DEMO)
	@mkdir -p build && rm -rf $(DEMO_DB) $(DEMO_DB).runs
	$(BIN)/python -m lokakern.bench sweep --suite smoke --grade quick --db $(DEMO_DB)
	$(BIN)/python -m lokakern.bench explain gemm --shape 2048,256,256 --budget 0.06 --db $(DEMO_DB)

install: $(FOR_DEV)

# CONTRIBUTING says which tests are core. Those that need a GPU run where there is one.
test: $(FOR_DEV)
	$(BIN)/python -m pytest $(if $(PART),--core-and $(PART),-m "not rest") $(if $(SLOW),--slow $(SLOW)) -n $(JOBS) --dist worksteal $(ARGS)

# 5: ARGS names tests that are all in the core.
test-all: $(FOR_DEV)
	$(BIN)/python -m pytest -m rest -n $(JOBS) --dist worksteal $(if $(PART),--part $(PART)) $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])

# Compilers change most between versions of torch. A virtual environment of its own, inside the other.
TRACED := tests/nn tests/conversion tests/functional tests/mods tests/probe

oldest:
	$(MAKE) test VENV=$(VENV)/oldest TORCH=$(OLDEST) ARGS="$(TRACED) $(ARGS)"

lint: $(FOR_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/architecture.py

types: $(FOR_DEV)
	$(BIN)/mypy

bench: $(FOR_DEV)
	$(BIN)/python -m pytest --benchmark-enable --benchmark-only $(ARGS) tests/benchmarks

wheel: $(FOR_DEV)
	$(BIN)/python scripts/check_wheel.py

docs: $(FOR_DOCS)
	$(BIN)/python -m typer lokakern.bench.cli.main utils docs --name "python -m lokakern.bench" --title Commands --output docs/commands.md
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "see build/docs/index.html"

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -not -path './.venv/*' -prune -exec rm -rf {} +
	@echo "kept $(VENV); to install everything again, remove it"

# ---- installing ----
say = { echo "$(1)" >&2; exit 1; }

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || $(call say,$(PYTHON) is not here: install Python 3.11 or later or name it with PYTHON=...)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(call say,lokakern needs Python 3.11 or later and $(PYTHON) is older: name another with PYTHON=python3.12)
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || $(call say,$(PYTHON) cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt-get install python3-venv))
	"$(PYTHON)" -m venv "$(VENV)"

# An editable install of this folder ($1: with which extras) and torch $(TORCH).
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(call say,$(VENV) has no pip: remove it and run make again)
	@echo "installing lokakern$(1) and torch $(TORCH) into $(VENV); the first time takes minutes"
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >"$(VENV)/constraints.txt"
	@rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c "$(VENV)/constraints.txt" -e ".$(1)"
endef

$(FOR_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,)
	@touch $@

$(FOR_DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,[dev])
	@command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check ziglang
	@touch $(FOR_DEMO) $@

# Beside what else is installed there.
$(FOR_DOCS): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,[docs])
	@touch $(FOR_DEMO) $@
