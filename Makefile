# make env   set up .venv (or the active conda environment); quick when nothing changed
# make demo  env, offline data, notebooks 00-05 headless, results table and runs/demo.json
# make lab   env, then JupyterLab on this checkout, in notebooks/ (LAB="--port 8889 --no-browser" passes options on)
# make test  env, then the whole test suite
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: env git-filter test demo lab clean

ifdef CONDA_PREFIX
BIN := $(CONDA_PREFIX)/bin
else
BIN := $(CURDIR)/.venv/bin
endif
PY := $(BIN)/python
# the stamp holds the hash of pyproject.toml: another hash, or a .venv that was moved, installs again
STAMP := $(BIN)/../.mmkit-installed
# what JupyterLab writes into a notebook's metadata besides outputs, and papermill into the copy it makes
LANGUAGE := codemirror_mode file_extension mimetype nbconvert_exporter pygments_lexer version
JUPYTER_KEYS := $(LANGUAGE:%=metadata.language_info.%) metadata.papermill cell.metadata.papermill cell.metadata.jupyter
HASH := $(shell cat pyproject.toml Makefile | sha256sum | cut -c1-16)-$(shell pwd | sha256sum | cut -c1-8)

env:
	@if [[ "$$(cat $(STAMP) 2>/dev/null || true)" == "$(HASH)" ]] && $(PY) -c "import mmkit.config" 2>/dev/null; then exit 0; fi
	if [[ ! -x $(PY) ]]; then
	  base=""
	  for name in python3.12 python3.11 python3; do
	    if $$name -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))" 2>/dev/null; then base=$$name; break; fi
	  done
	  if [[ -z "$$base" ]]; then
	    echo "mmkit needs Python 3.11 or 3.12 and found neither on PATH; install one (apt install python3.11 python3.11-venv) or activate a conda environment" >&2
	    exit 2
	  fi
	  echo "creating .venv with $$($$base --version)"
	  if ! $$base -m venv --clear .venv; then
	    rm -rf .venv
	    echo "$$base cannot create environments; install its venv package (apt install $$(basename $$base)-venv) and run again" >&2
	    exit 2
	  fi
	fi
	$(PY) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))" || {
	  echo "mmkit needs Python 3.11 or 3.12, but $(PY) is $$($(PY) --version); activate another environment" >&2
	  exit 2
	}
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	echo "installing mmkit and what it needs into $(BIN) (about 8 GB the first time, 2-4 minutes)"
	$(PY) -m pip install --quiet --editable ".[test]"
	$(PY) -m pip install --quiet --no-deps --group packs
	$(MAKE) --no-print-directory git-filter
	echo "$(HASH)" > $(STAMP)

# JupyterLab saves outputs into the notebooks it runs. As .gitattributes says, git reads them through this filter, so that it sees a change
# where a cell was edited and none where one was only run. Kept in this clone's .git/config; without it git takes the files as they are.
git-filter:
	@if [[ -e .git ]] && command -v git >/dev/null; then
	  git config filter.mmkit-notebooks.clean "'$(PY)' -m nbstripout --keep-id --extra-keys '$(JUPYTER_KEYS)'"
	fi

# PASSIVE: waiting threads sleep, so that tests beside other work on the same cores are 2-4 times faster.
# Two test files at a time (JOBS=1: one): most of a test is one Python thread, and starts of processes.
JOBS ?= 2
test: env
	@if [[ "$$(id -u)" == 0 ]] && command -v apt-get >/dev/null && ! command -v sinfo >/dev/null; then
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge) >/dev/null 2>&1 \
	    || echo "slurm-wlm could not be installed; the tests on a real SLURM are skipped"
	fi
	OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q --durations=15 -n $(JOBS) --dist loadfile $(TESTS)

demo: env
	@$(PY) -m mmkit notebook demo

lab: env
	@$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks \
	  --FileContentsManager.post_save_hook=mmkit.notebook.git_index.after_save $(LAB)

clean:
	@rm -rf build dist *.egg-info
