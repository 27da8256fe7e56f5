# make demo    pretrain a small Mula MoE on this machine, end to end      make demo CORPUS=my.jsonl
# make test    everything that can be tested here                         make demo PY=python3  (an environment
# make lint    ruff and mypy                                               that already has the dependencies)

VENV ?= .venv
# An interpreter that already has the dependencies; empty: make our own environment in $(VENV).
PY ?=
CORPUS ?=
# Test files that run at the same time.
TEST_WORKERS ?= 2
BASE_PYTHON ?= python3

ifeq ($(PY),)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/ready
SYCL := $(VENV)/sycl
TRITON := $(VENV)/triton/ready
else
PYTHON := $(PY)
READY :=
SYCL :=
TRITON :=
endif

.PHONY: demo test lint kernels clean

demo: kernels
	$(PYTHON) examples/local/demo.py $(if $(CORPUS),--corpus $(CORPUS))

# Files in their order, in which the long ones come early: ordered by their number of tests they would come last.
test: lint kernels $(SYCL) $(TRITON)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# Compiled operations, in place. Without a compiler the slower PyTorch path runs, and says so when it does.
kernels: $(READY)
	-$(PYTHON) setup.py --quiet build_ext --inplace >build.log 2>&1 || (tail -n 20 build.log; false)

# torch first: DeepSpeed's requirement on it would otherwise take the newest build, with gigabytes of CUDA.
$(VENV)/ready: requirements.txt
	$(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	grep '^torch==' requirements.txt | xargs $(VENV)/bin/python -m pip install --quiet
	$(VENV)/bin/python -m pip install --quiet -r requirements.txt
	touch $@

# Intel's SYCL runtime (1 GB): the kernels of csrc/sycl are compiled by it and run on its CPU device.
$(VENV)/sycl: requirements-sycl.txt $(READY)
	$(VENV)/bin/python -m pip install --quiet -r requirements-sycl.txt
	touch $@

# Triton (200 MB): its interpreter runs the GPU kernels on the CPU, in processes of their own (tests/ops).
$(VENV)/triton/ready: requirements-triton.txt $(READY)
	rm -rf $(VENV)/triton
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(VENV)/triton -r requirements-triton.txt
	mkdir -p $(VENV)/triton && touch $@

clean:
	rm -rf $(VENV) runs build build.log megatron/optimus/ops/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
