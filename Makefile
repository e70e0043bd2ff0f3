# make serve      build, fetch the default model, serve it on 127.0.0.1:8000 (ARGS="--port 8001 ..." for flags)
# make test       all tests of this machine        make test-arm  tests under emulated AArch64 CPUs
# make lint       style, types, import rules       make format    rewrite the sources in the project's style
# make dev        compile native/ into the tree, for work on the sources with PYTHONPATH=python
# make wheels     release wheels of both architectures, built and checked (docs/wheels.md)
# make wheel      the wheel, in build/wheel        make clean     remove all that was built, and $(VENV)
#
# PYTHON=python3.12 and CXX=clang++ choose the interpreter and the compiler.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=
# make has a built-in CXX; only one that was given counts as a choice.
ifneq ($(filter default undefined,$(origin CXX)),)
CHOSEN_CXX :=
else
CHOSEN_CXX := $(CXX)
endif

BIN := $(VENV)/bin
WHEEL_STAMP := build/wheel/.built
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE \
  $(shell find cmake native python -type f \( -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cmake' -o -name '*.html' \))
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: serve test lint format test-arm dev wheel wheels clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	@exec $(BIN)/neoserve serve $(ARGS)

$(VENV)/bin/python:
	@PYTHON="$(PYTHON)" CXX="$(CHOSEN_CXX)" tools/check_system.sh >/dev/null
	@echo "make: creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# One wheel serves the server, the tests and the packaging check in CI.
$(WHEEL_STAMP): $(SOURCES) | $(VENV)/bin/python
	@cxx="$$(PYTHON="$(PYTHON)" CXX="$(CHOSEN_CXX)" tools/check_system.sh)" || exit 1; \
	echo "make: building the wheel with $$cxx (about a minute the first time)"; \
	rm -rf build/wheel && mkdir -p build/wheel && \
	CXX="$$cxx" $(PIP) wheel --no-deps -w build/wheel .
	@touch $@

wheel: $(WHEEL_STAMP)

$(VENV)/.installed: $(WHEEL_STAMP)
	@echo "make: installing into $(VENV)"
	@$(PIP) install --no-deps --force-reinstall build/wheel/*.whl
	@$(PIP) install build/wheel/*.whl
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	@echo "make: installing the packages of the $* extra into $(VENV)"
	@$(PIP) install "$$(echo build/wheel/*.whl)[$*]"
	@touch $@

test: $(VENV)/.installed-test
	@models="$$(tools/test_models.sh $(VENV))" || exit 1; \
	NEOSERVE_TEST_MODELS="$$models" $(BIN)/python -m pytest tests $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_native.py
	$(BIN)/python tools/check_budgets.py lines

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix -q . || true
	$(BIN)/ruff format .
	find native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

# CPU=neoverse-v1 runs one emulated CPU; without it all of them.
test-arm: $(VENV)/.installed
	@models="$$(tools/test_models.sh $(VENV))" || exit 1; \
	MODELS="$$models" tools/arm/test.sh $(CPU)

wheels:
	tools/wheels/build.sh
	build/wheels/tools/bin/python tools/wheels/check.py
	tools/wheels/import.sh

dev:
	PYTHON="$(BIN)/python" tools/build_native.sh

clean:
	rm -rf build $(VENV)
