# make demo    the whole path on this machine, from one ONNX model to a fleet view
# make test    all tests; installs the servers that they start (mosquitto, sshd, Chromium ...) as root or with sudo
# make check   what CI runs: format, lint, types, import layers, documentation, tests
# make docs    the documentation site, in build/site; without network
# make hil     the whole path on a device of yours, or on a virtual one
# make hil-brokers  telemetry through three RabbitMQ nodes that are killed one after another
# make fuzz    each reader of what others send, a minute each; FUZZ_S=600 for ten
# make lock    renew the locked requirements; make audit looks for known vulnerabilities in them
# make setup   .venv with everything for development, tests and benchmarks (1.6 GB); the others call it

SHELL := /bin/bash
VENV ?= .venv
# The first Python on the path that EdgeRT runs on; `make PYTHON=/usr/bin/python3.12 ...` chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# A demo starts dozens of processes: each would compile every module again. tests/conftest.py does the same for tests.
unexport PYTHONDONTWRITEBYTECODE
# The number of tests at once: five for two cores, as many tests wait. Three where all compute: each process of pytest
# imports the tests and the engines again. Long files start first.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? $(if $(filter host/packager%,$(ROOM)),3,5) * n / 2 : 8)))
TESTS := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test docs zoo hil hil-arm64 hil-power hil-brokers check style types format fuzz lock audit servers emulators clean

# One environment: `make demo` installs 0.9 GB of it, the first other target the rest (1.6 GB in all).
# pip would compile one file after another, the tests of SciPy and others too: compileall uses all cores and omits them.
setup: $(VENV)/installed

$(VENV)/installed: EXTRAS := dev
$(VENV)/installed: LOCK := requirements/dev.txt
$(VENV)/installed-for-demo: EXTRAS := host,demo
$(VENV)/installed-for-demo: LOCK := requirements/demo.txt
$(VENV)/installed: requirements/dev.txt
$(VENV)/installed-for-demo: requirements/demo.txt
$(VENV)/installed $(VENV)/installed-for-demo: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 to 3.13 found; install one: sudo apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c '' || { echo "error: $(PYTHON) does not run; name one that does by its path: make PYTHON=/usr/bin/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; install what is missing: sudo apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@echo "installing edgert[$(EXTRAS)] into $(VENV) (one to five minutes, in which pip prints nothing)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r $(LOCK) || { \
		echo "error: $(LOCK) pins versions and hashes; if your index lacks one of them, install without: $(BIN)/python -m pip install -e '.[$(EXTRAS)]' && touch $@" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true
	@touch $@ $(VENV)/installed-for-demo

# DEVICE=ssh: over a real sshd on loopback and a real mosquitto, if they are installed. DEVICE=pull: from a real
# docker-registry on loopback.
demo: $(VENV)/installed-for-demo
	@$(BIN)/python -m examples.digits.demo $(if $(filter ssh pull,$(DEVICE)),--$(DEVICE))

# ROOM=host/packager: the tests in tests/host/packager.
test: setup servers
	@$(TESTS) $(if $(ROOM),tests/$(ROOM))

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# DUT=hil/duts/my-board.toml: a device of yours. The default is a container on this machine.
hil: setup servers
	@$(if $(DUT),EDGERT_DUT=$(abspath $(DUT))) $(BIN)/python -m pytest hil/test_device.py -s

# `make --jobs 2 check` does two of these at a time.
check: style types docs test

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# FUZZ_S: seconds for each target; TARGETS="wire http": only these. Needs Python 3.11 or newer on x86-64.
fuzz: setup
	@$(BIN)/python -m tests.fuzz $(TARGETS) --seconds $(or $(FUZZ_S),60)

# The newest versions that pyproject.toml allows, for Python 3.10 to 3.13 on x86-64 and aarch64; needs PyPI. The wheels of
# a device are among those that the tests run with.
COMPILE := pip compile --quiet --upgrade --universal --generate-hashes --no-header --python-version 3.10 pyproject.toml
WHEELS := deploy/edgert_deploy/bootstrap/locked_wheels.txt
# A device downloads no tokenizer, so it gets no huggingface-hub (wheelhouse.py).
lock: setup
	$(BIN)/uv $(COMPILE) --extra dev --output-file requirements/dev.txt
	$(BIN)/uv $(COMPILE) --extra host --extra demo --constraint requirements/dev.txt --output-file requirements/demo.txt
	echo pip | $(BIN)/uv $(COMPILE) --no-annotate - $(addprefix --extra ,tflite openvino onnxruntime tensorrt http channels text) \
		--override <(echo "huggingface-hub; sys_platform == 'none'") --constraint requirements/dev.txt --output-file $(WHEELS)

# Asks PyPI's database of vulnerabilities.
audit: setup
	@for lock in requirements/dev.txt $(WHEELS); do \
		echo "$$lock"; $(BIN)/python -m pip_audit --strict --require-hashes --disable-pip --progress-spinner off -r $$lock || { \
		echo "error: $$lock has known vulnerabilities, or the database on pypi.org does not answer" >&2; exit 1; }; \
	done

# Packages for emulated machines; the two targets below need them, and root.
emulators:
	@missing=""; \
	for each in qemu-system-aarch64=qemu-system-arm qemu-system-x86_64=qemu-system-x86 qemu-img=qemu-utils \
	  qemu-aarch64-static=qemu-user-static arch-test=arch-test cpio=cpio depmod=kmod mke2fs=e2fsprogs; do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v $${each%=*} >/dev/null || missing="$$missing $${each#*=}"; \
	done; \
	test -z "$$missing" && exit 0; \
	test "$$(id -u)" = 0 || { echo "error: emulated machines need root and$$missing" >&2; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing

# Ubuntu's chromium is a snap, which runs in no container: there the browser tests are skipped.
CHROMIUM := $(shell grep -qs '^ID=ubuntu' /etc/os-release || echo chromium-headless-shell fonts-dejavu-core)

# Trained models of other people's through `edgert build` and through the vendors' own recipes; about two hours.
zoo: setup
	@command -v espeak-ng >/dev/null || { install="apt-get install -y --no-install-recommends espeak-ng"; \
	test "$$(id -u)" = 0 || { echo "error: the zoo needs espeak-ng; install with: sudo $$install" >&2; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$install -qq; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[zoo]'
	@$(BIN)/python -m bench.zoo $(if $(MODELS),--models $(MODELS))

# An emulated Raspberry-Pi-class machine, as root: about half an hour.
hil-arm64: setup servers emulators
	@EDGERT_HIL_REQUIRED=1 EDGERT_DUT=$(abspath hil/duts/machine-arm64.toml) $(BIN)/python -m pytest hil/test_device.py -s

# Power cuts of an emulated machine, as root: CUTS=200 takes half an hour or more. SEED=n repeats the random numbers of a run,
# RESUME=log continues an interrupted run.
hil-power: setup servers emulators
	@$(BIN)/python -m hil.power_cuts --cuts $(or $(CUTS),200) $(if $(RESUME),--resume $(RESUME),$(if $(SEED),--seed $(SEED)))

# Three RabbitMQ nodes on loopback, killed one after another under load: about three minutes.
hil-brokers: setup servers
	@missing=""; \
	test -x /usr/lib/rabbitmq/bin/rabbitmq-server || missing="$$missing rabbitmq-server"; \
	PATH="$$PATH:/usr/sbin:/sbin" command -v haproxy >/dev/null || missing="$$missing haproxy"; \
	test -z "$$missing" || { install="apt-get install -y --no-install-recommends$$missing"; \
	test "$$(id -u)" = 0 || { echo "error: the brokers need$$missing. Install with: sudo $$install" >&2; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$install -qq; }
	@EDGERT_HIL_BROKERS=1 $(BIN)/python -m pytest hil/test_broker_cluster.py -s

# Packages for the tests, which start the servers on free ports, open pages in Chromium and compile the C client. Root also
# gets the packages for containers with systemd; without them those tests are skipped.
servers:
	@missing=""; \
	PATH="$$PATH:/usr/sbin" command -v mosquitto >/dev/null || missing="$$missing mosquitto"; \
	PATH="$$PATH:/usr/sbin" command -v sshd >/dev/null || missing="$$missing openssh-server"; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || missing="$$missing postgresql"; \
	command -v prometheus >/dev/null || missing="$$missing prometheus"; \
	command -v prometheus-alertmanager >/dev/null || missing="$$missing prometheus-alertmanager"; \
	test "$$(uname -m)" != x86_64 || PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q libb64 || missing="$$missing libb64-0d"; \
	command -v docker-registry >/dev/null || missing="$$missing docker-registry"; \
	command -v skopeo >/dev/null || missing="$$missing skopeo"; \
	PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || missing="$$missing nginx-light"; \
	command -v cc >/dev/null || missing="$$missing gcc libc6-dev"; \
	command -v tcsh >/dev/null || missing="$$missing tcsh"; \
	command -v fish >/dev/null || missing="$$missing fish"; \
	command -v zsh >/dev/null || missing="$$missing zsh"; \
	for b in chromium-headless-shell chromium chromium-browser google-chrome-stable google-chrome; do command -v $$b >/dev/null && break; done \
		|| missing="$$missing $(CHROMIUM)"; \
	if test "$$(id -u)" = 0; then \
	  command -v mmdebstrap >/dev/null || missing="$$missing mmdebstrap debian-archive-keyring"; \
	  command -v systemd-nspawn >/dev/null || missing="$$missing systemd-container"; \
	  command -v ip >/dev/null || missing="$$missing iproute2"; \
	  PATH="$$PATH:/usr/sbin" command -v iptables >/dev/null || missing="$$missing iptables"; \
	  ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing="$$missing libfaketime"; \
	fi; \
	test -z "$$(echo $$missing)" && exit 0; \
	install="apt-get install -y --no-install-recommends$$missing"; \
	if test "$$(id -u)" = 0; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$install -qq; \
	elif sudo -n true 2>/dev/null; then sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive $$install -qq; \
	else echo "error: the tests need$$missing. Install with: sudo $$install" >&2; exit 1; fi

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
