# `make run` and `make test` are all that a newcomer needs; see README.md.
PYTHON ?= python3
# `make PYTHON=/usr/bin/python3 VENV=.venv-debian test` tests with another Python, beside the first.
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# Tests start many commands, and Python would compile all their modules again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: axe run test test-all test-nightly test-frameworks coverage roles lint audit fuzz mutation bench bench-scale bench-slurm bench-stalls bench-asha bench-cap bench-sweepers gpu docs docs-site constraints clean

run: $(VENV)/.train
	$(BIN)/deploykit submit --backend local --wait

# In five minutes: the installation, every verb on all three backends, and what is quick to test.
# To collect the ignored files, each worker would import torch, and none of their tests is quick.
QUICK := --ignore tests/trainer --ignore tests/examples --ignore tests/frameworks/test_models.py \
    -m 'quick or not (slow or slurm or torch or frameworks or nightly)'
# Three at a time on two cores: many tests mostly wait for a process they have started.
test: $(VENV)/.dev
	HYPOTHESIS_PROFILE=brief $(BIN)/python -m pytest -n 3 $(QUICK)

# Every feature, in some forty minutes on two cores.
test-all: $(VENV)/.dev .venv-sagemaker/.ready .venv-aws/.ready .venv-pcluster/.ready .venv-docs/.ready \
    .venv-trackers/.ready
	$(BIN)/python -m pytest $(SELECT)

# The other rows of the large tables: each strategy in single and half precision, fifty kills, every
# pair of layouts that save and load, every umask on Slurm. About half an hour.
test-nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -m nightly

# The lines and branches that `make test` runs, by package; child processes and the copies of the
# node plane in bundles included. Slower than `make test`; a failed test does not stop it.
REPORT := build/coverage/report.json
coverage: $(VENV)/.dev
	rm -rf build/coverage && mkdir -p build/coverage
	-HYPOTHESIS_PROFILE=brief $(BIN)/python -m coverage run -m pytest $(QUICK)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage json -q -i -o $(REPORT)
	$(BIN)/python -m tests.coverage_table $(REPORT)

# Minutes more: every example of examples/frameworks and ten scripts of other people, in three
# places each. `python -m tests.frameworks.people fetch` downloads those that no package has.
test-frameworks: $(VENV)/.dev .venv-sagemaker/.ready .venv-frameworks/.ready
	$(BIN)/python -m pytest -m frameworks tests/frameworks

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p deploykit_node
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(BIN)/python tests/shell_lint.py

# What could do harm: ruff's security rules, every call that could, and known vulnerabilities.
audit: $(VENV)/.dev .venv-audit/.ready
	$(BIN)/ruff check --select S .
	$(BIN)/python tests/audit/calls.py
	$(BIN)/python tests/audit/packages.py

# Ten thousand hostile answers, files and lines for each reader; `make test-all` tries 200.
FUZZ := tests/fuzz tests/test_hostile.py tests/job/test_jobfile_fuzz.py tests/cli/test_terminal.py \
    tests/lib/test_paste.py tests/node/test_node_preflight_messages.py tests/trainer/test_checkpoint_readers.py \
    tests/trainer/test_http_messages.py
fuzz: $(VENV)/.dev
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout=3600 $(FUZZ)

# Changes five modules in one place at a time, and prints the changes that no test notices, and how
# many they are. Half an hour or more.
mutation: $(VENV)/.dev .venv-mutation/.ready
	$(BIN)/python -m tests.mutation.mutate

bench: $(VENV)/.dev .venv-torchx/.ready .venv-frameworks/.ready
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/traffic.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/diagnose.py
	$(BIN)/python benchmarks/watching.py
	$(BIN)/python benchmarks/elastic.py --losses 5 --steps 3000

# On a machine with GPUs: writes docs/gpu.md. Without, `gpu/measure.py --dry` tries it on the CPU.
gpu: $(VENV)/.dev
	$(PIP) --no-deps -r benchmarks/gpu/requirements.txt
	$(BIN)/python benchmarks/gpu/measure.py

# Checks of accessibility, with which a test looks at reports; it is skipped without.
AXE := axe-core-4.14.1
axe: build/axe/package/axe.min.js
build/axe/package/axe.min.js:
	mkdir -p build/axe
	cd build/axe && npm pack --silent $(AXE:axe-core-%=axe-core@%) && tar -xzf $(AXE).tgz package/axe.min.js

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/terminal.py
	$(BIN)/python docs/live_page.py

# Four people's first minutes, each in an empty home; some minutes, most of them to install.
roles: $(VENV)/.dev
	$(BIN)/python docs/roles.py --python $(PYTHON)

# The site, in build/site. It needs the network only to make its environment.
docs-site: .venv-docs/.ready
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site
	@echo 'open build/site/index.html'

# The environments. infra/install.py chooses the build of PyTorch, and uv or pip.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) infra/install.py $(VENV) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@$(PYTHON) infra/install.py $(VENV) -e '.[dev,sagemaker,train]'
	@touch $@

LAUNCHER := tests/backends/sagemaker/launcher
.venv-sagemaker/.ready: $(VENV)/.dev $(LAUNCHER)/environment.sh $(LAUNCHER)/requirements.txt
	sh $(LAUNCHER)/environment.sh .venv-sagemaker
	touch $@

# The AWS CLI wants a botocore of its own.
.venv-aws/.ready: tests/doctor/requirements.txt
	$(PYTHON) -m venv .venv-aws
	.venv-aws/bin/python -m pip --disable-pip-version-check install -q -r tests/doctor/requirements.txt
	touch $@

.venv-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -q -r docs/requirements.txt
	touch $@

.venv-mutation/.ready: tests/mutation/requirements.txt
	$(PYTHON) -m venv .venv-mutation
	.venv-mutation/bin/python -m pip --disable-pip-version-check install -q -r tests/mutation/requirements.txt
	touch $@

.venv-audit/.ready: tests/audit/requirements.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip --disable-pip-version-check install -q -r tests/audit/requirements.txt
	touch $@

# AWS ParallelCluster has its own wishes too.
.venv-pcluster/.ready: tests/doctor/infra/requirements.txt
	$(PYTHON) -m venv .venv-pcluster
	.venv-pcluster/bin/python -m pip --disable-pip-version-check install -q -r tests/doctor/infra/requirements.txt
	touch $@

TRACKERS := tests/observe/trackers
.venv-trackers/.ready: $(VENV)/.dev $(TRACKERS)/environment.sh $(TRACKERS)/requirements.txt
	sh $(TRACKERS)/environment.sh .venv-trackers
	touch $@

FRAMEWORKS := tests/frameworks
.venv-frameworks/.ready: $(VENV)/.dev $(FRAMEWORKS)/environment.sh $(FRAMEWORKS)/requirements.txt
	sh $(FRAMEWORKS)/environment.sh .venv-frameworks
	touch $@

bench-scale: $(VENV)/.dev
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/scale_nodes.py

bench-slurm: $(VENV)/.dev
	$(BIN)/python benchmarks/slurm.py
	$(BIN)/python benchmarks/dump.py

# Ten minutes: 30 runs that stall and 30 that do not, against the stall rule.
bench-stalls: $(VENV)/.dev
	$(BIN)/python benchmarks/stalls/measure.py

# Ten minutes: the steps of a sweep with ASHA, beside those of the grid.
bench-asha: $(VENV)/.dev
	$(BIN)/python benchmarks/asha.py

# Eight minutes: runs that are stopped at their cost cap, on each backend.
bench-cap: $(VENV)/.dev .venv-sagemaker/.ready
	$(BIN)/python benchmarks/cap.py

# Six minutes: a sweep beside Ray Tune and Hydra's Optuna sweeper. Wants a quiet machine.
bench-sweepers: $(VENV)/.dev .venv-sweepers/.ready
	$(BIN)/python benchmarks/sweepers/measure.py

.venv-sweepers/.ready: benchmarks/sweepers/requirements.txt
	$(PYTHON) -m venv .venv-sweepers
	.venv-sweepers/bin/python -m pip --disable-pip-version-check install -q -r benchmarks/sweepers/requirements.txt
	touch $@

.venv-torchx/.ready: benchmarks/torchx.txt
	$(PYTHON) -m venv .venv-torchx
	.venv-torchx/bin/python -m pip --disable-pip-version-check install -q -r benchmarks/torchx.txt
	touch $@

constraints: $(VENV)/.dev
	@echo '# Exact versions of everything that the Makefile installs. Renew with `make constraints`.' \
	    > constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' | sort -f >> constraints.txt

clean:
	rm -rf .venv .venv-sagemaker .venv-frameworks .venv-aws .venv-pcluster .venv-torchx .venv-audit \
	    .venv-mutation .venv-docs .venv-trackers .venv-sweepers
