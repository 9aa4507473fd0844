# The two commands for someone new are `make demo` and `make test`. Both need Rust, a C++ compiler,
# make and Python 3; whatever else is missing is put into .tools/ by scripts/tools.py. `make help`
# lists the rest. CUDA=1 builds and tests with the CUDA backend.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PREFIX ?= /usr/local
DESTDIR ?=
PROFILE ?= release
PROMPT ?= What is the capital of France?
# Where the demo runs: cpu, or cuda in a build with CUDA=1.
DEVICE ?= cpu
JOBS ?= $(shell nproc)
# 1 builds the CUDA backend too.
CUDA ?= 0
FEATURES := $(if $(filter 1,$(CUDA)),--features cuda)

# Further arguments for the cargo build.
CARGO_FLAGS ?=
# Our own crate without optimisation takes a tenth of the time to compile.
UNOPTIMISED := --config=profile.dev.package.unsloth-rs.opt-level=0

# One cargo build for CMake, the C tests, the engine, the trainer and the benches.
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
STAGE := $(CURDIR)/build/prefix
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf

export PATH := $(CURDIR)/.tools/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/.tools/python$(if $(PYTHONPATH),:$(PYTHONPATH))
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

TOOLS := python3 scripts/tools.py
CONFIGURE := cmake -G Ninja --log-level=NOTICE
# All but what is generated.
C_FILES = $(shell git ls-files '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' | grep -vE '^(include/unsloth\.h|c_tests/layout\.c)$$')

.PHONY: help demo finetune engine trainer model stage install dist test test-rust test-c test-engine test-trainer test-examples test-dist test-scripts test-cuda emulate gpu-pack bench header fmt lint package fuzz clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: engine model ## Let a small language model write text through the library
	build/engine/engine --model $(MODEL) --device $(DEVICE) --chat --prompt "$(PROMPT)" --tokens 48 --temperature 0

# What the model is asked before and after. Each question of the data is one line of it.
QUESTION ?= What is libunsloth?
ASK = build/engine/engine --device $(DEVICE) --chat --prompt "$(QUESTION)" --tokens 64 --temperature 0 --model
TUNED := build/finetune

finetune: engine trainer model ## Teach the small language model about this project, in a few minutes
	mkdir -p $(TUNED)
	build/trainer/trainer --model $(MODEL) --device $(DEVICE) --data examples/trainer/data/libunsloth.jsonl \
	  --epochs 6 --batch-tokens 512 --learning-rate 1e-4 --warmup 3 --output $(TUNED)/model.gguf --log $(TUNED)/log.jsonl
	python3 examples/trainer/scripts/plot_loss.py $(TUNED)/log.jsonl $(TUNED)/loss.svg
	@echo; echo "== $(QUESTION) Before:"; $(ASK) $(MODEL)
	@echo; echo "== $(QUESTION) After:"; $(ASK) $(TUNED)/model.gguf
	@echo; echo "== The model is $(TUNED)/model.gguf, its loss curve $(TUNED)/loss.svg"

# What cargo needs to build with FEATURES.
.PHONY: compilers
compilers:
	$(if $(FEATURES),$(TOOLS) nvcc)

stage: compilers
	$(TOOLS) cmake ninja
	$(CONFIGURE) -S . -B build/library -DCMAKE_INSTALL_PREFIX="$(PREFIX)" \
	  -DUNSLOTH_CARGO_PROFILE=$(PROFILE) -DUNSLOTH_CARGO_TARGET_DIR="$(TARGET)" \
	  -DUNSLOTH_CARGO_FLAGS="$(CARGO_FLAGS)" -DUNSLOTH_CUDA=$(if $(FEATURES),ON,OFF)
	cmake --build build/library
	cmake --install build/library --prefix "$(STAGE)" > build/stage.log

install: stage ## Install the library into PREFIX (/usr/local)
	DESTDIR="$(DESTDIR)" cmake --install build/library --prefix "$(PREFIX)"

dist: stage ## Pack the library for machines without Rust into build/dist
	scripts/dist.sh "$(STAGE)" build/dist

engine: stage ## Build the C++ engine of examples/engine against the installed library
	$(CONFIGURE) -S examples/engine -B build/engine -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$(STAGE)"
	cmake --build build/engine --target engine

trainer: stage ## Build the C++ trainer of examples/trainer against the installed library
	$(CONFIGURE) -S examples/trainer -B build/trainer -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$(STAGE)" \
	  -DTRAINER_ENGINE="$(CURDIR)/build/engine/engine"
	cmake --build build/trainer --target trainer

model: $(MODEL)
$(MODEL): scripts/fetch_model.py
	$(TOOLS) pip
	python3 scripts/fetch_model.py models
	@touch $@

test: test-rust test-c test-engine test-trainer test-examples test-dist test-scripts ## Run every test that this machine can run

# The unit tests are a second build of the library, and need no speed. The others compute much.
test-rust: compilers
	cargo test --locked --features candle $(FEATURES) $(UNOPTIMISED) --lib
	cargo test --locked --features candle $(FEATURES) --test '*'
	cargo test --locked --features candle $(FEATURES) --doc

# The programs of the C tests; test-c runs them.
.PHONY: build-test-c
build-test-c: stage
	$(TOOLS) pkg-config
	$(CONFIGURE) -S c_tests -B build/c_tests -DCMAKE_PREFIX_PATH="$(STAGE)" -DUNSLOTH_CARGO_PROFILE=$(PROFILE) \
	  -DUNSLOTH_CARGO_TARGET_DIR="$(TARGET)" -DUNSLOTH_CARGO_FLAGS="$(CARGO_FLAGS)" -DUNSLOTH_CUDA=$(if $(FEATURES),ON,OFF)
	cmake --build build/c_tests

test-c: build-test-c
	ctest --test-dir build/c_tests --output-on-failure -j $(JOBS)

test-engine: engine model
	cmake --build build/engine
	ctest --test-dir build/engine --output-on-failure -j $(JOBS)

test-trainer: engine trainer
	cmake --build build/trainer
	ctest --test-dir build/trainer --output-on-failure -j $(JOBS)

test-examples: stage
	$(TOOLS) numpy
	$(CONFIGURE) -S examples/c -B build/example_c -DCMAKE_PREFIX_PATH="$(STAGE)"
	cmake --build build/example_c
	build/example_c/attention
	for program in readme readme_cxx; do build/example_c/$$program | diff - <(printf '0\n0.5\n1\n1.5\n'); done
	PYTHONPATH="$(STAGE)/share/unsloth/python:$$PYTHONPATH" python3 examples/python/attention.py
	PYTHONPATH="$(STAGE)/share/unsloth/python:$$PYTHONPATH" python3 python/tests/test_unsloth.py
	cargo run --locked --quiet --features candle $(FEATURES) --example attention
	cargo run --locked --quiet --features candle $(FEATURES) --example candle
	cargo run --locked --quiet --features candle $(FEATURES) --example inference
	cargo run --locked --quiet --features candle $(FEATURES) --example mixed_precision
	cargo run --locked --quiet --features candle $(FEATURES) --example finetuning
	cargo run --locked --quiet --features candle $(FEATURES) --example memory_optimization

test-dist: dist
	$(TOOLS) pkg-config
	scripts/test_dist.sh "$$(ls -t build/dist/*.tar.gz | head -1)"

test-scripts:
	python3 -m unittest discover -s benches
	python3 -m unittest discover -s kernels/dev

# What a machine without a GPU can tell of the CUDA backend: the kernels' text and what they use,
# the tests of the backend as a whole, which see that the driver is missing, what is not of one
# operation, and the C tests, which compute with each on the CPU. Nothing of that is long, so neither
# our crate nor the kernels' compiler is optimised. The C tests' library is the one that the Rust tests
# use, for which its build names a test too, and dependencies are those of test-rust: named in one call
# with our crate, the kernels' compiler would have candle ask for other features.
CUDA_BUILD := --features candle --test context $(UNOPTIMISED)
# Without optimisation a frame has a place for every problem and plan that passes through it, and calls of whole layers nest.
test-cuda: export RUST_MIN_STACK = 4194304
test-cuda: ## Test what a CUDA build does without a GPU
	$(TOOLS) nvcc
	cargo test --locked --package unsloth-kernels --package unsloth-kernels-contract --config=profile.dev.opt-level=0 --lib
	cargo test --locked --features cuda $(CUDA_BUILD) --lib --test cuda --test host
	$(MAKE) CUDA=1 PROFILE=dev CARGO_FLAGS="$(CUDA_BUILD)" test-c

# Families of tests, and names of tests of them (empty: all).
TESTS ?= elementwise
ONLY ?=
emulate: ## Run TESTS on an emulated GPU: kernels of sm_80, thread by thread
	$(TOOLS) nvcc
	LD_LIBRARY_PATH=$$(python3 kernels/dev/emulator/compile.py driver) UNSLOTH_TEST_BACKEND=cuda \
	  cargo test --locked --features cuda $(addprefix --test ,$(TESTS)) -- --skip misuse $(ONLY)

gpu-pack: ## Build what a GPU machine needs for tests and benchmarks into .gpu/
	scripts/gpu_pack.sh

bench: ## Run the benchmarks and update benches/results
	cargo bench --locked
	$(TOOLS) matplotlib
	python3 benches/report.py record
	python3 benches/report.py render

header: ## Write the header, its layout test and the list of symbols from src/ffi
	UNSLOTH_UPDATE_HEADER=1 cargo test --locked --quiet --test header
	$(MAKE) stage
	python3 c_tests/abi.py "$(STAGE)/lib/libunsloth.so" include/unsloth.h c_tests/symbols.txt --update

fmt: ## Format Rust and C
	$(TOOLS) clang-format
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml
	cargo fmt --manifest-path kernels/same_bits/Cargo.toml
	clang-format -i $(C_FILES)

lint: compilers ## Check formatting, clippy and documentation
	$(TOOLS) clang-format
	cargo fmt --all --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo fmt --check --manifest-path kernels/same_bits/Cargo.toml
	clang-format --dry-run --Werror $(C_FILES)
	python3 benches/tuning.py check
	cargo clippy --locked --features candle $(FEATURES) $(if $(FEATURES),--workspace) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --features candle $(FEATURES) $(if $(FEATURES),--workspace)

# Packed and listed, not built again: that would compile the kernels' compiler once more.
package: ## See that the crates can be published (needs cargo 1.90)
	cargo package --locked --quiet --workspace --exclude unsloth-header --no-verify --allow-dirty

fuzz: ## Call the C ABI with arbitrary arguments for FUZZ_SECONDS
	fuzz/run.sh

clean: ## Remove what was built; models and tools stay
	cargo clean
	rm -rf build
