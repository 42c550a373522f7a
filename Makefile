# make demo | test | slow | check | sanitize | bench | bench-peers: each makes its own .venv where there is none yet.
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.stamp-runtime
DEV := $(VENV)/.stamp-dev
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt

.PHONY: demo test slow check sanitize bench bench-quality bench-peers bench-curves bench-gpu format clean

demo: $(RUNTIME)
	$(BIN)/quail demo

# Two processes with a thread each, then the tests marked `alone`. ARGS may leave either without tests (status 5), not both.
test: $(DEV)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --alone no -n 2 --dist loadfile $(ARGS); beside=$$?; \
	$(BIN)/python -m pytest -q --alone only $(ARGS); alone=$$?; \
	case $$beside/$$alone in 0/0 | 0/5 | 5/0) ;; 0/*) exit $$alone ;; *) exit $$beside ;; esac

slow: $(DEV)
	$(BIN)/python -m pytest -q -m slow

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The native kernels built with address and undefined-behaviour sanitizers, under their tests (minutes; needs g++).
sanitize: $(DEV)
	CXX=g++ QUAIL_KERNELS=native ASAN_OPTIONS=detect_leaks=0 \
	  QUAIL_KERNELS_CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -q tests/engine/test_kernels.py tests/engine/test_products.py --timeout 3600

bench: $(DEV)
	$(BIN)/python -m benchmarks

bench-quality: $(DEV)
	$(BIN)/python -m benchmarks quality

# Beside vLLM, llama.cpp and transformers, each in an environment of its own; ARGS="--quick" takes five minutes.
bench-peers: $(DEV)
	$(BIN)/python -m benchmarks peers $(ARGS)

bench-curves: $(DEV)
	$(BIN)/python -m benchmarks curves $(ARGS)

# What a CUDA device reaches (docs/gpu.md); without one it says so. ARGS="4B" measures one shape beside the default.
bench-gpu: $(DEV)
	$(BIN)/python -m benchmarks gpu $(ARGS)

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# The first Python of 3.11 to 3.13 that works; `make PYTHON=…` takes another.
$(BIN)/python:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in python3 python3.13 python3.12 python3.11; do \
	    if $$candidate -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then echo "Quail needs Python 3.11, 3.12 or 3.13 with venv; found: $$(python3 --version 2>&1)" >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Quail into $(VENV) (torch is about 200 MB)"
	@$(PIP) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Quail and its test tools into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $(RUNTIME) $@
