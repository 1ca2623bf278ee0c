# Every target sets itself up from nothing: its own .venv, idempotent, and a missing system package is named
# together with the command that installs it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TUNE   := .venv-tune
export PATH := $(CURDIR)/$(BIN):$(PATH)
FILES := git ls-files -co --exclude-standard -- 2>/dev/null
SOURCES := $(sort $(wildcard $(shell $(FILES) proto shim valved scheduler patches tools meson.build pyproject.toml)))
TUNE_SOURCES := $(sort $(wildcard $(shell $(FILES) tune)))

.PHONY: other-files help venv attack test-engines test-all demo-vllm lab-quick foreign fuzz cluster-tools build fmt check test bench demo demo-memory demo-granted demo-granted-vllm demo-cluster demo-tune test-tune gpu manual wheel clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml tools/build/system.sh
$(VENV)/.installed: $(VENV)/.ready $(SOURCES)
$(TUNE)/.ready: tune/pyproject.toml
$(TUNE)/.installed: $(TUNE)/.ready $(TUNE_SOURCES)

# A file that is gone has no time to compare. So the names of what was installed are kept, as a sum.
sum_of = $(shell printf '%s\n' $(1) | cksum)
SUM := $(call sum_of,$(SOURCES))
TUNE_SUM := $(call sum_of,$(TUNE_SOURCES))
ifneq ($(file < $(VENV)/.names),$(SUM))
$(VENV)/.installed: other-files
endif
ifneq ($(file < $(TUNE)/.names),$(TUNE_SUM))
$(TUNE)/.installed: other-files
endif

# One make at a time builds in a checkout. Another waits for the folder's lock and then looks again at what is out of
# date: an installation that is made anew pulls the files away from under the tests of the first. -o: a compiler's server
# (sccache), which stays, would keep the lock for ever.
ifndef MAY_BUILD
$(VENV)/.ready $(VENV)/.installed $(TUNE)/.ready $(TUNE)/.installed:
	@command -v flock >/dev/null || sh tools/build/system.sh
	@flock -o . $(MAKE) -s MAY_BUILD=1 $@
else
$(VENV)/.ready:
	@sh tools/build/system.sh
	@echo "setting up $(VENV): some minutes, once" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check --upgrade 'pip>=23.2'
	@$(BIN)/python tools/build/requirements.py > $(VENV)/requirements.txt
	@$(BIN)/pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.installed:
	@echo "building Valve" >&2
	@mkdir -p build
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
		-Cbuild-dir=build/wheel .
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
		-Cbuild-dir=$(CURDIR)/build/tools-wheel ./tools
	@echo "$(SUM)" > $(VENV)/.names
	@touch $@

$(TUNE)/.ready:
	@echo "setting up $(TUNE), with torch: some minutes, once" >&2
	@began=$$(date +%s); test -x $(TUNE)/bin/python || $(PYTHON) -m venv $(TUNE); \
	$(TUNE)/bin/pip install -q --disable-pip-version-check --upgrade 'pip>=23.2' 'setuptools>=77' && \
	$(TUNE)/bin/pip install -q --disable-pip-version-check --no-build-isolation './tune[test]' && \
	echo "set up $(TUNE) in $$(($$(date +%s) - began)) s"
	@touch $@

$(TUNE)/.installed:
	@$(TUNE)/bin/pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall ./tune
	@echo "$(TUNE_SUM)" > $(TUNE)/.names
	@touch $@
endif

venv: $(VENV)/.ready ## only set up .venv

build: $(VENV)/.installed ## build and install into .venv

fmt: venv ## format C and Python
	@git ls-files -co --exclude-standard -- '*.c' '*.h' | xargs -r $(BIN)/clang-format -i
	@$(BIN)/ruff check -q --fix-only . ; $(BIN)/ruff format -q .

check: build ## lint, types, import rules, sizes, formatting
	@$(BIN)/python -m valve_tools.check.run

test: build ## all tests that need no GPU and no Kubernetes binaries, two files at a time; EXPLORE=1: another order, other examples
	@$(BIN)/pytest -q -p no:cacheprovider -n $(or $(TEST_JOBS),2) --dist loadfile $(if $(EXPLORE),--hypothesis-profile=explore,--randomly-seed=1) $(PYTEST_ARGS)

attack: build ## hostile processes on the link, beside an online service; ATTACK_ROUNDS=1000, ATTACK_SEED=...
	@ATTACK_ROUNDS=$(or $(ATTACK_ROUNDS),300) $(BIN)/pytest -q -s -p no:cacheprovider tests/node/test_attack.py

ENGINES ?= .venv-engines
test-engines: build ## install real vLLM and SGLang on CPU (6 GB, once) and run them under reclaim; MATRIX=1: older releases too; QUICK=1: a part
	@$(PYTHON) tests/engines/install.py $(ENGINES) --sglang $(if $(MATRIX),--matrix) $(if $(QUICK),--quick)
	@VALVE_ENGINES=$(ENGINES) $(BIN)/pytest -q -p no:cacheprovider -p no:randomly --durations=0 \
		-m 'engine$(if $(QUICK), and quick)' tests/engines $(PYTEST_ARGS)

test-all: export VALVE_WHOLE_TABLES = 1
test-all: export VALVE_SOAK ?= 40
test-all: test ## make test with whole fault tables, a soak of a cluster (VALVE_SOAK faults), and every test with real engines
	@$(MAKE) test-engines MATRIX=1

demo-vllm: build ## a real vLLM online and another offline on one emulated GPU (after make test-engines)
	@$(BIN)/python -m valve_tools.engines.demo --engines $(ENGINES) $(DEMO_ARGS)

foreign: venv ## add NVIDIA's cuda-bindings, cuda-core and numba-cuda, so that make test runs them on the emulator
	@$(BIN)/python tools/build/requirements.py foreign > $(VENV)/foreign.txt
	@$(BIN)/pip install -q --disable-pip-version-check -r $(VENV)/foreign.txt

cluster-tools: ## build real Kubernetes, containerd and helm for tests (Go, about 7 minutes, once)
	@tests/cluster/build_tools.sh

FUZZ_RUNS ?= 5000000
FUZZ_LINK_RUNS ?= 3000000 # each is up to 128 events on a model of the kernel: some 10,000 a second of a core, short ones
FUZZ = clang -std=gnu11 -D_GNU_SOURCE -DFUZZER -O1 -g -Iproto/abi $(addprefix -Ishim/src/,. channels hooks kv link activity) -Itests/shim/c \
	-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
fuzz: ## libFuzzer on the ioctl parser, on KV orders (FUZZ_RUNS inputs each) and on orders of link events (FUZZ_LINK_RUNS); needs clang
	@mkdir -p build/corpus build/corpus-order build/corpus-link
	@$(FUZZ) tests/fuzz/fuzz_capture.c $(addprefix shim/src/channels/,rm.c rmcall.c rmcontrol.c) -o build/fuzz_capture
	@$(FUZZ) tests/fuzz/fuzz_order.c $(addprefix shim/src/,kv/vmm.c kv/ranges.c kv/places.c kv/parts.c link/packet.c lock.c) -o build/fuzz_order
	@$(FUZZ) -fno-sanitize-coverage=trace-cmp -include tests/fuzz/kernel.h $(addprefix tests/fuzz/,fuzz_link.c kernel.c kernel_pages.c rest.c) \
		$(addprefix shim/src/,$(addprefix link/,link.c request.c pages.c until.c ownfd.c orphan.c packet.c) lock.c) -o build/fuzz_link
	@build/fuzz_capture -runs=$(FUZZ_RUNS) -max_len=9000 -print_final_stats=1 build/corpus
	@build/fuzz_order -runs=$(FUZZ_RUNS) -max_len=2050 -print_final_stats=1 build/corpus-order
	@build/fuzz_link -runs=$(FUZZ_LINK_RUNS) -max_len=128 -entropic=0 -print_final_stats=1 build/corpus-link

bench: build ## every benchmark, as a table
	@$(BIN)/valve bench

gpu: $(if $(findstring --dry-run,$(GPU_ARGS)),build) ## the experiments for a real GPU; GPU_ARGS=--dry-run rehearses them on the emulated one
	@tools/gpu/run $(GPU_ARGS)

demo: build ## an online service and an offline job share one emulated GPU
	@$(BIN)/valve demo

lab-quick: build ## check the claims of the results pages in a small run (under three minutes), and whether a page is stale
	@$(BIN)/python -m valve_tools.check.run results
	@$(BIN)/valve replay quick --seeds 1 --fresh
	@cd build && $(CURDIR)/$(BIN)/python -m valve_tools.lab.granted --quick --out ../docs/results

demo-memory: build ## an online service and an offline job between which KV memory moves, five minutes
	@$(BIN)/valve demo memory

demo-granted-vllm: build ## demo-granted with a real vLLM on each side (after make test-engines)
	@$(BIN)/python -m valve_tools.engines.granted_demo --engines $(ENGINES) $(DEMO_ARGS)

demo-granted: build ## a service with and without its owner's consent to pauses between its steps
	@$(BIN)/valve demo granted $(DEMO_ARGS)

demo-cluster: ## a real control plane, a real node and a simulated fleet, the chart, and its removal (root)
	@$(MAKE) --no-print-directory -j2 build cluster-tools
	@$(BIN)/valve demo cluster

test-tune: build $(TUNE)/.installed ## the tests of valve-tune, in an environment of its own (torch), and of training under a real valved
	@$(TUNE)/bin/python -m pytest -q -p no:cacheprovider tests/tune $(PYTEST_ARGS)
	@VALVE_TUNE_PYTHON=$(abspath $(TUNE))/bin/python $(BIN)/pytest -q -p no:cacheprovider tests/node/test_tune.py $(PYTEST_ARGS) || [ $$? = 5 ]

demo-tune: build $(TUNE)/.installed ## train a tiny model beside a service on the emulated GPU; pause, kill, resume
	@$(BIN)/valve demo tune --python $(TUNE)/bin/python $(DEMO_ARGS)

manual: venv ## the manual as a site in build/manual; a broken link fails
	@$(BIN)/mkdocs build -q --strict -f tools/build/manual.yml
	@echo build/manual/index.html

wheel: venv ## build the wheels of valve and valve-tools into dist/
	@$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist . ./tools

clean: ## remove what was built
	@flock -o . rm -rf build dist $(VENV)
