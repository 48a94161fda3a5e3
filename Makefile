# SPDX-License-Identifier: Apache-2.0
# What people do with DynMo, one word each. CMake does the work; CMakePresets.json has the builds.

# One build for demo and test; `make test PRESET=ci` makes warnings errors.
PRESET ?= release
PREFIX ?= /usr/local
REPEAT ?= 20
EXECUTIONS ?= 1000000
PRECISION ?= fp32

export DYNMO_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dynmo
export CCACHE_DIR ?= $(DYNMO_CACHE)/ccache
export CCACHE_MAXSIZE ?= 2G
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell scripts/jobs)
# A test of several processes waits for a sixth of its time, so half as many again run at once.
export CTEST_PARALLEL_LEVEL ?= $(shell expr $$(nproc) \* 3 / 2)

.PHONY: help setup build demo test nightly test-peers unit check format soak fuzz bench bench-peers bench-torch reproduce install clean

help:
	@echo 'make demo      show what balancing gives: eight ranks that sleep, then a training on this machine'
	@echo 'make test      build everything and run every test'
	@echo 'make nightly   what a change must pass (.ci/run), with all that CI draws or leaves out'
	@echo 'make test-peers  compare with the full PyTorch, transformers, torchrun, mpirun (9 GB, on demand)'
	@echo 'make unit      build and test dynmo::core alone, without libtorch'
	@echo 'make check     formatting, clang-tidy, shell scripts, sanitizers'
	@echo 'make build     build the command line, build/release/apps/dynmo/dynmo'
	@echo 'make setup     install what a build needs (the others do it, too)'
	@echo 'make format    format all sources'
	@echo 'make soak      run the tests of several ranks REPEAT=20 times, and all samples under sanitizers'
	@echo 'make fuzz      feed every reader EXECUTIONS=1000000 damaged inputs, under ASan and UBSan'
	@echo 'make bench     time data, planner, schedules and simulator (the others: docs/performance.md)'
	@echo 'make bench-peers  speed and memory beside torch.distributed.pipelining (PRECISION=bf16, PEERS=FLAGS)'
	@echo 'make reproduce  regenerate the figures of docs/reproduce.md (PART=NAME; CHECK=1 compares with those recorded)'
	@echo 'make bench-torch  what balancing gains and costs on a PyTorch model of which half freezes'
	@echo 'make install   install to PREFIX=/usr/local'
	@echo 'make release   write the files of a release to build/release-VERSION (docs/releasing.md)'
	@echo 'make clean     remove the builds'

setup:
	@scripts/setup

# Configured each time: it takes a second, and sees what was installed since.
build:
	@scripts/setup core runtime
	@cmake --preset $(PRESET) >/dev/null
	@scripts/build $(PRESET) --target dynmo

demo: build
	@scripts/demo build/$(PRESET)/apps/dynmo/dynmo

test: setup
	@cmake --preset $(PRESET) >/dev/null
	@scripts/build $(PRESET)
	@ctest --preset $(PRESET)

nightly:
	@.ci/run nightly

# MEGATRON=PATH of a checkout of Megatron-LM, for what compares with its reader.
test-peers: build
	@scripts/setup peers python
	@scripts/build $(PRESET) --target dynmo_python_package
	@tests/peers/run.py --dynmo build/$(PRESET)/apps/dynmo/dynmo --python $(DYNMO_CACHE)/peers/bin/python

unit:
	@scripts/setup core
	@cmake --preset core >/dev/null
	@scripts/build core
	@ctest --preset core -L unit

check:
	@scripts/setup core check
	@scripts/check

format:
	@scripts/setup check
	@scripts/format

soak: setup
	@scripts/setup core check
	@cmake --preset $(PRESET) >/dev/null
	@scripts/build $(PRESET)
	@ctest --preset $(PRESET) -L 'ranks|threads' --repeat until-fail:$(REPEAT)
	@DYNMO_SAMPLES=all ctest --preset $(PRESET) -L sources
	@DYNMO_SAMPLES=all ctest --preset $(PRESET) -R '^python.torch_(bits|faults)$$'
	@DYNMO_SAMPLES=all ctest --preset $(PRESET) -R 'Explorer|Spaces|Mutants|ElasticThreads|SurvivalThreads|ElasticProcesses|SurvivalHosts|KillScripts'
	@DYNMO_SAMPLES=all DYNMO_MARKS=none scripts/check asan tsan

fuzz:
	@scripts/setup core
	@cmake --preset asan >/dev/null
	@scripts/build asan --target fuzz_targets
	@cd build/asan/tests/fuzz && for target in fuzz_*; do \
	  if [ -x $$target ] && [ -f $$target ]; then ./$$target --executions $(EXECUTIONS) || exit 1; fi; done

bench:
	@scripts/setup core bench
	@cmake --preset bench >/dev/null
	@scripts/build bench
	@build/bench/bench/core_bench

# Against a Python with PyTorch; the script says how to get one.
bench-peers: build
	@bench/peers/compare.py --dynmo build/$(PRESET)/apps/dynmo/dynmo --precision $(PRECISION) --out build/bench-peers.json $(PEERS)

# PART=NAME: one part of bench/reproduce/rows.json.
reproduce: build
	@bench/reproduce/reproduce.py --dynmo build/$(PRESET)/apps/dynmo/dynmo $(addprefix --part ,$(PART)) $(if $(CHECK),--check)

bench-torch: setup
	@cmake --preset $(PRESET) >/dev/null
	@scripts/build $(PRESET) --target dynmo_python_package
	@for script in gain cost; do LD_LIBRARY_PATH=$(DYNMO_CACHE)/python-torch/stand-ins OMP_NUM_THREADS=1 PYTHONPATH=build/$(PRESET)/python \
	  $(DYNMO_CACHE)/python-torch/bin/python bench/torch/$$script.py || exit 1; done

install: build
	@scripts/build $(PRESET)
	@cmake --install build/$(PRESET) --prefix "$(PREFIX)"

# SITE=URL: also the site, whose links lead to the repository at URL.
release:
	@scripts/setup core runtime python wheel $(if $(SITE),site)
	@scripts/package --binary --wheel $(if $(SITE),--site $(SITE))

clean:
	rm -rf build
