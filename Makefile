# Two commands from a fresh clone: `make quickstart` and `make test`. Both set up .venv first where it is missing, as does
# `make evidence`, which measures a real language model.
# The first interpreter that really runs and is of a version the dependencies support; name another with PYTHON=…
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p -c "$(IN_RANGE)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python

# An editable installation knows the modules that there were, so another set of files is another installation.
MODULES := $(shell find shadowattn experiments conf -name '*.py' | sort | cksum | cut -d' ' -f1)
MARKER := $(VENV)/.installed.$(MODULES)
FETCH_MARKER := $(VENV)/.installed.fetch
KERNELS := CMakeLists.txt $(wildcard shadowattn/kernels/csrc/* shadowattn/kernels/csrc/isa/*)

.PHONY: quickstart evidence npu-compile test test-library lint sanitized-kernels sanitize arm setup clean

quickstart: setup
	$(RUN) -m experiments.run +exp=quickstart

# Downloads 93 MB once (540 MB on the disk); then about two hours on two cores, and the same command goes on where it stopped.
evidence: $(FETCH_MARKER)
	$(RUN) -m experiments.fetch smollm2
	$(RUN) -m experiments.run +exp=headline

# Intel's NPU compiler in a cache folder, 2 GB, with wine; for +exp=npu_compile alone.
npu-compile: setup
	$(RUN) -m experiments.npu_compiler

# A process for each core, a file at a time: half of the time goes into starting Python and importing torch. A process that dies
# ends the run with the name of its test; replacing it may leave the rest waiting for ever.
test: setup
	$(RUN) -m pytest -n auto --dist loadfile --max-worker-restart=0

# The tests of the library by another interpreter: make test-library PYTHON=python3.12
# Tests that import experiments are left out. Those of NNCF's graph and of the optimal schedule need packages of that extra.
LIBRARY_VENV := .venv-library-$(notdir $(PYTHON))
OF_EXPERIMENTS = tests/experiments $(shell grep -rlE '^ *(from|import) (tests\.)?experiments' tests --include='test_*.py')
test-library:
	@test -n "$(PYTHON)" || { echo "error: expected Python 3.11 to 3.13 on the PATH, found none; name one with: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(LIBRARY_VENV)
	$(LIBRARY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[experiments,test]'
	$(LIBRARY_VENV)/bin/python -m pytest -n auto --dist loadfile --max-worker-restart=0 $(OF_EXPERIMENTS:%=--ignore=%)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# The kernel tests once more, with address and undefined-behaviour sanitizers in the kernels. Nothing but the kernels is
# instrumented, so the runtime has to be there before Python, and leaks of the interpreter are not ours to report.
SANITIZED := build/sanitized
sanitized-kernels:
	cmake -S . -B $(SANITIZED) -DSHADOWATTN_SANITIZE=ON > /dev/null
	cmake --build $(SANITIZED) --parallel 2 > /dev/null

sanitize: setup sanitized-kernels
	SHADOWATTN_NATIVE=$(CURDIR)/$(SANITIZED)/_native.so ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	$(RUN) -m pytest -q -n auto tests/kernels -p no:cacheprovider --hypothesis-profile=few

# The kernel tests on an emulated Arm processor. Needs Debian's packages qemu-user, g++-aarch64-linux-gnu and debootstrap, and
# takes Arm's Python from Debian and its wheels from PyPI, 2 GB. Any torch serves the kernels; the wheels for Arm after
# torch 2.10 want CUDA.
ARM := $(CURDIR)/build/arm
ARM_PYTHON := $(ARM)/root/usr/bin/python
ARM_PACKAGES := torch==2.10.0 numpy openvino safetensors tokenizers transformers pytest pytest-xdist hypothesis
arm: export PATH := $(PATH):/usr/sbin
arm: $(ARM)/.installed
	cmake -S . -B $(ARM)/kernels -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
	cmake --build $(ARM)/kernels --parallel 2 > /dev/null
	SHADOWATTN_NATIVE=$(ARM)/kernels/_native.so PYTHONPATH=$(CURDIR):$(ARM)/site \
	$(ARM_PYTHON) -m pytest -o addopts= -n auto --max-worker-restart=0 tests/kernels -p no:cacheprovider --hypothesis-profile=few

$(ARM)/.installed: $(MARKER)
	@for tool in qemu-aarch64 aarch64-linux-gnu-g++ debootstrap; do command -v $$tool > /dev/null || { \
	echo "error: expected $$tool, found none; install Debian's qemu-user, g++-aarch64-linux-gnu and debootstrap"; exit 1; }; done
	rm -rf $(ARM)
	debootstrap --arch=arm64 --variant=minbase --download-only --include=python3.11,libgomp1,libstdc++6 bookworm \
	  $(ARM)/root > /dev/null
	for package in $(ARM)/root/var/cache/apt/archives/*.deb; do dpkg-deb -x $$package $(ARM)/root || exit 1; done
	printf '#!/bin/sh\nexec qemu-aarch64 -0 $(ARM_PYTHON) -L $(ARM)/root $(ARM_PYTHON)3.11 "$$@"\n' > $(ARM_PYTHON)
	chmod +x $(ARM_PYTHON)
	grep -v '^torch==' constraints.txt > $(ARM)/constraints.txt
	$(RUN) -m pip --python $(ARM_PYTHON) install --quiet --disable-pip-version-check --only-binary=:all: \
	--constraint $(ARM)/constraints.txt --target $(ARM)/site $(ARM_PACKAGES)
	@touch $@

setup: $(MARKER)

# Exact versions come from constraints.txt; the marker file is written only after everything was installed.
$(MARKER): pyproject.toml constraints.txt $(KERNELS)
	@test -n "$(PYTHON)" || { echo "error: expected Python 3.11 to 3.13 on the PATH, found none; name one with: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[experiments,test]'
	@touch $@

$(FETCH_MARKER): $(MARKER)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fetch]'
	@touch $@

clean:
	rm -rf $(VENV)
