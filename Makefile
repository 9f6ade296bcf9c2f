# `make run` and `make test` are all that a newcomer needs; see README.md.
PYTHON ?= python3
# `make PYTHON=/usr/bin/python3 VENV=.venv-debian test` tests with another Python, beside the first.
VENV ?= .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check install -q
# Tests start many commands, and Python would compile all their modules again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all lint docs clean
.PHONY: test-nightly test-frameworks bench gpu docs-site constraints axe

run: $(VENV)/.train
	$(BIN)/deploykit submit --backend local --wait

# In five minutes: the installation, every verb on all three backends, and what is quick to test.
# To collect the ignored files, each worker would import torch, and none of their tests is quick.
QUICK := --ignore tests/trainer --ignore tests/examples --ignore tests/frameworks/test_models.py \
    --ignore tests/frameworks/test_round_trip.py \
    -m 'quick or not (slow or slurm or torch or frameworks or nightly)'
# Four at a time on two cores: many tests mostly wait for a process they have started.
test: $(VENV)/.dev
	HYPOTHESIS_PROFILE=brief $(BIN)/python -m pytest -n 4 $(QUICK)

# Every feature, in some forty minutes on two cores.
test-all: $(VENV)/.dev .venv-sagemaker/.ready .venv-sagemaker3/.ready .venv-aws/.ready .venv-pcluster/.ready \
    .venv-docs/.ready .venv-trackers/.ready .venv-streaming/.ready
	$(BIN)/python -m pytest -n 3 $(SELECT)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p deploykit_node
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(BIN)/python tests/shell_lint.py

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/terminal.py
	$(BIN)/python docs/live_page.py

clean:
	rm -rf .venv .venv-*

# For maintainers; benchmarks/README.md has the rest.

# The other rows of the large tables: each strategy in single and half precision, fifty kills, every
# pair of layouts that save and load, every umask, and what a cluster does to jobs. About an hour.
test-nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -m nightly

# Minutes more: every example of examples/frameworks and ten scripts of other people, in three
# places each. `python -m tests.frameworks.people fetch` downloads those that no package has.
test-frameworks: $(VENV)/.dev .venv-sagemaker/.ready .venv-frameworks/.ready
	$(BIN)/python -m pytest -m frameworks tests/frameworks

bench: $(VENV)/.dev .venv-torchx/.ready .venv-frameworks/.ready
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/traffic.py
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/diagnose.py
	$(BIN)/python benchmarks/watching.py

# On a machine with GPUs: writes benchmarks/gpu/results.md. Without, try `gpu/measure.py --dry`.
gpu: $(VENV)/.dev
	$(BIN)/python $(PIP) -c constraints.txt --no-deps -r benchmarks/gpu/requirements.txt
	$(BIN)/python benchmarks/gpu/measure.py

# The site, in build/site. It needs the network only to make its environment.
docs-site: .venv-docs/.ready
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site
	@echo 'open build/site/index.html'

constraints: $(VENV)/.dev
	@echo '# Exact versions of everything that the Makefile installs. Renew with `make constraints`.' \
	    > constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' | sort -f >> constraints.txt

# Checks of accessibility, with which a test looks at reports; it is skipped without.
AXE := axe-core-4.14.1
axe: build/axe/package/axe.min.js
build/axe/package/axe.min.js:
	mkdir -p build/axe
	cd build/axe && npm pack --silent $(AXE:axe-core-%=axe-core@%) && tar -xzf $(AXE).tgz package/axe.min.js

# The environments. infra/install.py chooses the build of PyTorch, and uv or pip.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) infra/install.py $(VENV) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@$(PYTHON) infra/install.py $(VENV) -e '.[dev,sagemaker,train]'
	@touch $@

# Beside $(VENV), and with some of its packages.
FOLDER.sagemaker := tests/backends/sagemaker/launcher
FOLDER.trackers := tests/observe/trackers
FOLDER.frameworks := tests/frameworks
FOLDER.streaming := tests/examples/streaming
# Apart: the AWS CLI and ParallelCluster pin their own botocore.
REQUIREMENTS.aws := tests/doctor/requirements.txt
REQUIREMENTS.pcluster := tests/doctor/infra/requirements.txt
REQUIREMENTS.docs := docs/requirements.txt
# Complete as it stands: what else the SDK requires is 500 MB, which no class here imports.
REQUIREMENTS.sagemaker3 := tests/backends/sagemaker/sdk3.txt
OPTIONS.sagemaker3 := --no-deps
REQUIREMENTS.audit := tests/audit/requirements.txt
REQUIREMENTS.torchx := benchmarks/torchx.txt

.SECONDEXPANSION:
.venv-sagemaker/.ready .venv-trackers/.ready .venv-frameworks/.ready .venv-streaming/.ready: .venv-%/.ready: \
    $(VENV)/.dev $$(FOLDER.$$*)/environment.sh $$(FOLDER.$$*)/requirements.txt
	sh $(FOLDER.$*)/environment.sh .venv-$*
	touch $@

.venv-sagemaker3/.ready .venv-aws/.ready .venv-pcluster/.ready .venv-docs/.ready .venv-audit/.ready \
    .venv-torchx/.ready: .venv-%/.ready: $$(REQUIREMENTS.$$*)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP) $(OPTIONS.$*) -r $(REQUIREMENTS.$*)
	touch $@
