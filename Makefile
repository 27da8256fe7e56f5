# make demo        pretrain a small Mula MoE on this machine, end to end   make demo CORPUS=my.jsonl
# make check       lint, types and the quick tests                         make demo PY=python3  (an environment
# make test        everything that can be tested here                       that already has the dependencies)
# make campaigns   long experiments: kills, damage, layouts, endings
# make test-ipex   unit tests and a short run on torch 2.8 with Intel's extension, in .venv-ipex
# make test-deepspeed VERSION=0.17.6   tests against stock DeepSpeed, on that version of it
# make docs        the documentation site, into build/site

VENV ?= .venv
# An interpreter that already has the dependencies; empty: make our own environment in $(VENV).
PY ?=
CORPUS ?=
# Test files that run at the same time. On two cores four take 12:20, three 14 minutes: tests of ranks wait a lot.
TEST_WORKERS ?= 4
BASE_PYTHON ?= python3

# Bytecode is kept, whatever the shell says: tests start hundreds of programs, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(PY),)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/ready
SYCL := $(VENV)/sycl
TRITON := $(VENV)/triton/ready
DOCS := $(VENV)/docs
else
PYTHON := $(PY)
READY :=
SYCL :=
TRITON :=
DOCS :=
endif

# Files and folders whose tests take a minute and a half together on two cores, and touch every room.
QUICK := tests/packaging/test_structure.py tests/packaging/test_documents.py tests/packaging/test_step_path.py \
    tests/packaging/test_outline.py tests/packaging/test_size.py tests/packaging/test_project_files.py \
    tests/unit/config tests/unit/platform tests/unit/layers tests/unit/moe tests/unit/data/test_order.py \
    tests/unit/data/test_dataset.py tests/unit/checkpoint/test_slices.py tests/unit/checkpoint/test_manifest.py \
    tests/unit/training/test_lr_schedule.py tests/unit/training/test_health.py tests/unit/deepspeed_ext/zero

.PHONY: demo check test test-deepspeed test-ipex campaigns docs lint kernels sycl-kernels clean

demo: kernels
	$(PYTHON) examples/local/demo.py $(if $(CORPUS),--corpus '$(subst ','\'',$(CORPUS))')

# Files in their order, in which the long ones come early: ordered by their number of tests they would come last.
test: $(READY) $(SYCL) $(TRITON)
	$(MAKE) --jobs 2 --output-sync=recurse kernels lint sycl-kernels  # of a fresh clone 80, 30 and 40 s of a core
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

check: lint
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(TEST_WORKERS) --dist loadfile -m "not slow and not gpu" $(QUICK)

# Another version of DeepSpeed, in a folder of its own before the environment's.
VERSION ?= 0.17.6
OTHER_DEEPSPEED := build/deepspeed-$(VERSION)

test-deepspeed: kernels
	test -d $(OTHER_DEEPSPEED) || $(PYTHON) -m pip install --quiet --no-deps --no-build-isolation \
	    --target $(OTHER_DEEPSPEED) deepspeed==$(VERSION)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(OTHER_DEEPSPEED) $(PYTHON) -m pytest -q \
	    tests/distributed/deepspeed_ext/test_patch.py tests/distributed/deepspeed_ext/zero/test_stock_files.py \
	    tests/distributed/deepspeed_ext/zero/test_deepspeed_api.py tests/distributed/deepspeed_ext/test_ds_config.py \
	    tests/distributed/deepspeed_ext/test_engine.py tests/distributed/deepspeed_ext/test_initialize.py \
	    tests/distributed/deepspeed_ext/zero/test_grad_scaling.py tests/distributed/deepspeed_ext/zero/test_sync_errors.py \
	    tests/integration/test_zero3.py

# The oldest torch that is supported, with Intel's extension of it. pip's index has torch 2.8 as a build for CUDA, 4 GB
# with its libraries; an index of CPU builds in TORCH_INDEX saves most. Kernels are built in a copy of the tree, because
# those of this tree are for another torch.
TORCH_INDEX ?=
IPEX := .venv-ipex
IPEX_TREE := build/ipex

test-ipex: $(IPEX)/ready
	rm -rf $(IPEX_TREE) && mkdir -p $(IPEX_TREE)
	git ls-files -z | xargs -0 cp --parents -t $(IPEX_TREE)
	cd $(IPEX_TREE) && $(CURDIR)/$(IPEX)/bin/python setup.py --quiet build_ext --inplace >build.log 2>&1
	cd $(IPEX_TREE) && OMP_NUM_THREADS=1 $(CURDIR)/$(IPEX)/bin/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile \
	    -m "not gpu" tests/unit tests/integration/test_pretrain.py

$(IPEX)/ready: requirements.txt
	$(BASE_PYTHON) -m venv $(IPEX)
	$(IPEX)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.8.0
	grep -v '^torch==' requirements.txt >$(IPEX)/requirements.txt
	$(IPEX)/bin/python -m pip install --quiet torch==2.8.0 intel_extension_for_pytorch==2.8.0 -r $(IPEX)/requirements.txt
	touch $@

# Hours on a small machine; each program has --help for its sizes.
campaigns: kernels
	mkdir -p runs/campaigns
	$(PYTHON) -m tests.campaigns.process_endings --endings 200
	$(PYTHON) -m tests.campaigns.kill_resume --kills 80 --output runs/campaigns/kill_resume.json
	$(PYTHON) -m tests.campaigns.corruption --output runs/campaigns/corruption.json
	$(PYTHON) -m tests.campaigns.layout_pairs --output runs/campaigns/layout_pairs.json
	$(PYTHON) -m tests.campaigns.layout_chain --output runs/campaigns/layout_chain.json

docs: $(DOCS)
	$(PYTHON) tools/dev/configuration_reference.py --check
	$(PYTHON) -m mkdocs build --strict

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# Compiled operations, in place. Without a compiler the slower PyTorch path runs, and says so when it does.
kernels: $(READY)
	-$(PYTHON) setup.py --quiet build_ext --inplace >build.log 2>&1 || (tail -n 20 build.log; false)

# The SYCL kernels that the tests run, compiled beside the type checks. Intel's runtime keeps SPIR-V in the first pass, and
# in the second what that becomes on this CPU; each worker of the tests would do both for itself.
sycl-kernels: $(READY) $(SYCL)
	for pass in 1 2; do OMP_NUM_THREADS=1 $(PYTHON) -m tests.ops.sycl_device || exit; done

# torch first: DeepSpeed's requirement on it would otherwise take the newest build, with gigabytes of CUDA.
$(VENV)/ready: requirements.txt
	@echo "Making an environment in $(VENV) with $$($(BASE_PYTHON) --version): $$(grep -c '==' requirements.txt) packages"
	@echo "of requirements.txt from pip's index (torch, DeepSpeed, transformers, test tools) and what they need, 4 GB."
	@echo "Nothing else is installed. With an environment that has them already: make demo PY=path/to/python"
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

$(VENV)/docs: requirements-docs.txt $(READY)
	$(VENV)/bin/python -m pip install --quiet -r requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) runs build build.log megatron/optimus/ops/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
