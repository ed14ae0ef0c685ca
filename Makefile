# Everything here works from a fresh clone, as root, with an empty HOME. `make demo` and `make test` need make, a C++20 compiler and
# Python >= 3.11; the rest goes into .venv.
#   PYTHON=python3.12   the interpreter to build .venv with (default: the newest there is)
#   VENV=none           use PYTHON as it is, with what it has installed
#   PYTEST="-k name"    more arguments for pytest
#   JOBS=1              tests at once (default: one per core)
#   TORCH=torch==2.13.0 what `make test-torch` asks pip for

ifndef PYTHON
  PYTHON := $(shell for v in 3.14 3.13 3.12 3.11 3; do \
    python$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v python$$v; break; }; done)
endif
VENV ?= .venv
PYTEST ?=
JOBS ?= $(shell nproc)
APT := apt-get install -y make g++ python3 python3-venv

# The CUDA of the driver, "13", "12" or nothing: decides which GPU packages the demo installs. What the tests bring is CUDA 13's.
DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -n 1)
comma := ,
EXTRAS_demo := demo$(if $(DRIVER_CUDA),$(comma)$(if $(filter 12,$(DRIVER_CUDA)),cuda12,cuda13))
EXTRAS_test-gpu := test,cuda13

ifeq ($(VENV),none)
  PY := $(PYTHON)
  stamp =
else
  PY := $(VENV)/bin/python
  stamp = $(VENV)/.$(1)
endif

.DELETE_ON_ERROR:
.PHONY: demo test test-full test-pythons test-gpu test-torch test-rdma test-mutants lint docs dist clean

demo: $(call stamp,demo)
	$(PY) -m mkernel demo

test: $(call stamp,test)
	$(PY) -m pytest -n $(JOBS) --dist loadfile --durations 20 -m "not gpu" $(PYTEST)

test-full: $(call stamp,test)
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not gpu" --full --timeout 1200 $(PYTEST)

test-gpu: $(call stamp,test-gpu)
	$(PY) -m pytest -m gpu $(PYTEST)

# mkernel.torch on CPU tensors and target cpu. Any torch from 2.11 on will do; its build without CUDA is the smallest, where pip's own
# configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) names a place that has one.
TORCH ?= torch==2.13.0
test-torch: $(call stamp,torch)
	$(PY) -m pytest tests/with_torch -m "not gpu" --full $(PYTEST)

# Real verbs in virtual machines: root, and apt-get install -y --no-install-recommends qemu-system-x86
test-rdma: $(call stamp,test)
	$(PY) -m pytest -m rdma --require-vm --full $(PYTEST)

# Do the tests notice one-line changes of the host code? About an hour on two cores; MUTANTS="--drawn 2 ops" is a smaller run, and
# MUTANTS="--results FILE" goes on where an earlier one ended. Mutated are copies of the tree.
MUTANTS ?=
test-mutants: $(call stamp,test)
	$(PY) tests/mutants/run.py --jobs $(JOBS) $(MUTANTS)

# `make test` by each Python there is from 3.11 on, in virtual environments .venv-3.x of their own; PYTHONS="/path/to/python3.13 ..." names others.
PYTHONS ?= $(shell for v in 11 12 13 14; do for python in $$(command -v python3.$$v) $$HOME/.pyenv/versions/3.$$v.*/bin/python; do \
  $$python -c '' 2>/dev/null && echo $$python && break; done; done; true)
test-pythons:
	@test -n "$(PYTHONS)" || { echo "no Python from 3.11 on found: PYTHONS='/path/to/python3.13' names some"; exit 1; }
	@for python in $(PYTHONS); do \
	  minor=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; \
	  echo "== $$python ($$minor)"; \
	  $(MAKE) test PYTHON=$$python VENV=.venv-$$minor || exit 1; \
	done

lint: $(call stamp,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib
	PATH="$(dir $(PY)):$$PATH" clang-format --dry-run --Werror $$(find kernels_src -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp')

# The site: build/docs/index.html. Any warning fails, as does a link between pages that leads nowhere.
docs: $(call stamp,docs)
	$(PY) -m sphinx -W --keep-going -q -j auto -b html -d build/doctrees docs build/docs
	$(PY) docs/check_links.py build/docs

# What would be uploaded: a wheel and a source distribution, in dist/.
dist: $(call stamp,test)
	$(PY) -m hatchling build

clean:
	rm -rf .venv .venv-3.* build dist docs/reference .pytest_cache .mypy_cache .ruff_cache
	find mkernel tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Without ensurepip (Debian without python3-venv) the interpreter's own pip installs into a bare environment.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo 'mkernel needs Python >= 3.11: $(APT)' >&2; exit 1; }
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install -q pip; \
	else echo '$(PYTHON) has neither ensurepip nor pip: $(APT)' >&2; exit 1; fi || { rm -rf $(VENV); exit 1; }

$(VENV)/.torch: $(VENV)/.test
	$(PY) -m pip install -q --disable-pip-version-check '$(TORCH)'
	@touch $@

$(VENV)/.%: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install -q --disable-pip-version-check -e '.[$(or $(EXTRAS_$*),$*)]'
	@touch $@
