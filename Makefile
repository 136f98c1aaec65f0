# Each target sets up .venv by itself. Variables:
#   PYTHON=/path/to/python3   which Python makes .venv (default: the first one found from 3.11 up)
#   CUDA=cuda13|cuda12        which CUDA `gpu` and `bench` install; `make demo CUDA=cuda13` installs it too
#   SYSTEM_PACKAGES=1         without a network: .venv sees the packages of PYTHON, builds with its
#                             scikit-build-core, pybind11 and jaxlib, and installs no others
#   WORKERS=2                 processes that `test` spreads over
#   GPU_WORKERS=8             processes that `gpu` spreads over, on one GPU
#   DEMO="--steps 50"         options of the demo

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check docs format gpu sanitize bench bench-multi bench-train tune roofline products collectives exhaustive test-versions clean

VENV ?= .venv
export PYTHON SYSTEM_PACKAGES VENV
RUN := $(VENV)/bin/python
WORKERS ?= 2
GPU_WORKERS ?= 8
comma := ,
GPU_CUDA := $(or $(CUDA),cuda13)
DEMO_READY := $(VENV)/ready-demo$(if $(CUDA),$(comma)$(CUDA))
TEST_READY := $(VENV)/ready-test,nvrtc,dev,docs
GPU_READY := $(VENV)/ready-test,$(GPU_CUDA)
NATIVE := CMakeLists.txt $(wildcard csrc/*.cc csrc/*.h)
SCRIPTS := scripts/setup_venv.sh scripts/requirements.py

help: ## this list
	@sed -n '/^#   /s/^#//p' $(firstword $(MAKEFILE_LIST))
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_READY) ## train a small sharded language model on this machine (into out/demo)
	$(RUN) examples/train_lm.py --out out/demo $(if $(findstring --resume,$(DEMO)),,--overwrite) $(DEMO)

test: $(TEST_READY) ## every test that needs no GPU
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/gpu --ignore=tests/multi_gpu tests

check: $(TEST_READY) ## format, lint, types, state of the GPU record, docs, tests: what CI runs
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	find csrc tests -name '*.cc' -o -name '*.h' -o -name '*.cuh' | \
	  xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(RUN) tests/gpu/record.py --check
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory test

docs: $(TEST_READY) ## the documentation (into out/docs), a warning is an error
	$(RUN) -m sphinx -W --keep-going -q -E -j auto -d out/doctrees docs out/docs

format: $(TEST_READY) ## rewrite Python and C++ as `check` wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	find csrc tests -name '*.cc' -o -name '*.h' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format -i

gpu: $(GPU_READY) ## the tests that need GPUs, then the record of what they saw
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false SHARDOPS_REQUIRE_GPUS=1 \
	  $(RUN) -m pytest -p no:benchmark -n $(GPU_WORKERS) --dist worksteal tests/gpu
	JAX_PLATFORMS=cuda,cpu $(RUN) -m pytest -p no:benchmark tests/multi_gpu
	$(RUN) tests/gpu/record.py

sanitize: $(GPU_READY) ## small launches of every kernel under compute-sanitizer, on this GPU
	PYTHON=$(RUN) scripts/sanitize.sh

bench: $(GPU_READY) ## time the kernels beside XLA and PyTorch on this GPU, and what the host does
	$(RUN) benchmarks/bench.py

bench-multi: $(GPU_READY) ## time sharded products and layers over this host's GPUs, beside XLA's partitioning; draw the picture in docs
	mkdir -p out
	$(RUN) benchmarks/multi.py --json out/multi.json --picture docs/_static/scaling.png

bench-train: $(GPU_READY) ## train a model under each recipe on this GPU, beside Flax and XLA; draw the curves in docs
	$(RUN) benchmarks/train.py

tune: $(GPU_READY) ## time launch shapes of the norms on this GPU; its cache keeps the best
	$(RUN) benchmarks/tune.py --table "$$($(RUN) -c 'from shardops import config; print(config.get().cache_dir / "tuned")')"

roofline: $(GPU_READY) ## time norms and softmax over row lengths on this GPU, and draw the picture in docs
	mkdir -p out
	$(RUN) benchmarks/tune.py --limit 0 --json out/norms.json
	$(RUN) benchmarks/softmax_times.py --json out/softmax.json
	$(RUN) benchmarks/roofline.py out/norms.json out/softmax.json

products: $(GPU_READY) ## time products beside XLA and PyTorch on this GPU, and draw the picture in docs
	mkdir -p out
	$(RUN) benchmarks/gemm_times.py --json out/products.json
	$(RUN) benchmarks/gemm_picture.py out/products.json

collectives: $(TEST_READY) ## what everyday layouts and layers move, into docs/*collectives.md
	$(RUN) -m benchmarks.collectives
	$(RUN) -m benchmarks.recipe_collectives

exhaustive: $(TEST_READY) ## thousands of drawn cases where `test` has hundreds
	SHARDOPS_EXHAUSTIVE=1 $(RUN) -m pytest -n $(WORKERS) --dist load tests/fuzz tests/rules tests/layers_flax \
	  tests/kernels/test_resources.py tests/kernels/test_packs_of_any_gpu.py

test-versions: ## a smoke part of the tests on every supported pair of Python and JAX found here
	scripts/test_versions.sh

clean: ## remove .venv and everything built
	rm -rf $(VENV) .venv-versions build dist out .pytest_cache .ruff_cache

$(VENV)/built: pyproject.toml shardops/version.py $(NATIVE) $(SCRIPTS)
	scripts/setup_venv.sh build

$(VENV)/ready-%: $(VENV)/built
	scripts/setup_venv.sh extras $*
