# Every target installs what it needs first; a second run installs nothing.
PY := .venv/bin/python
# The tests have jobs of ordinary users, who must be able to read this checkout.
READABLE := scripts/readable.sh
export OMP_NUM_THREADS := 1

.PHONY: help demo test check lint test-versions paper bench reference setup clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install Debian packages, .venv and this package
	@scripts/setup.sh

demo: setup ## the same jobs alone, sharing blindly, and placed by the helper, on a throw-away Slurm
	@$(PY) -m slurm_gpushare demo

lint: setup ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check: lint ## lint, types and unit tests: for daily work, under a minute
	$(READABLE) $(PY) -m pytest -q tests/unit -m "not slow"

test: lint ## all tests, on a real Slurm
	$(READABLE) $(PY) -m pytest -q tests

test-versions: setup ## the real-Slurm tests on Slurm 22.05, 24.11 and 26.05
	for suite in bookworm trixie forky; do $(READABLE) $(PY) -m pytest -q tests/real --slurm $$suite || exit 1; done

paper: setup ## the paper's experiment: 24 jobs under five policies; table and picture in out/paper
	@$(PY) -m slurm_gpushare demo --policies all --seconds 15 --out out/paper

bench: setup ## benchmarks; results in out/bench
	$(PY) -m bench

reference: setup ## write the man pages and the reference pages from the code
	$(PY) scripts/make_reference.py

clean: ## remove what the targets above made, but not .venv
	rm -rf build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
