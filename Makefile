# Every target installs what it needs first; a second run installs nothing.
PY := .venv/bin/python
# The tests have jobs of ordinary users, who must be able to read this checkout.
READABLE := scripts/readable.sh
export OMP_NUM_THREADS := 1
# Slurm 22.05, 24.11 and 26.05, for the targets that try several.
SUITES ?= bookworm trixie forky
# Pairs with measured telemetry, where they are: only with these do figures of workloads not seen before mean something.
DATA := $(abspath $(or $(GPUSHARE_DATA),../shared/data))
PAPER_DATA := $(if $(wildcard $(DATA)/rtx3090_pairs.csv),--pairs $(DATA)/rtx3090_pairs.csv --profiles $(DATA)/rtx3090_profiles.csv)

ANSIBLE := build/ansible-env

.PHONY: help demo test abuse check lint test-versions chaos soak paper truth bench matrix vendor-tests dist test-packages afternoon reference docs ansible pypi setup clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install Debian packages, .venv and this package
	@scripts/setup.sh

demo: setup ## workloads that nobody knows, measured, then placed by the helper, on a throw-away Slurm
	@$(READABLE) $(PY) -m gpushare_lab demo

lint: setup ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check: lint ## lint, types and unit tests: for daily work, under a minute
	$(READABLE) $(PY) -m pytest -q -n auto tests/unit tests/lab -m "not slow"

# Unit tests share the cores. Those with daemons mostly wait: two testbeds at once. Those that race against a clock come last, by themselves.
test: lint ## all tests, on a real Slurm
	$(READABLE) $(PY) -m pytest -q -n auto tests/unit tests/lab
	$(READABLE) $(PY) -m pytest -q -n 2 --dist loadfile tests --ignore tests/unit --ignore tests/lab -m "not alone and not full"
	$(READABLE) $(PY) -m pytest -q tests/real -m alone

# One release after the other: the tests with daemons, chaos and abuse in their short forms, and the request matrix's.
test-versions: setup ## the same with chaos, abuse and the matrix in short, on Slurm 22.05, 24.11 and 26.05
	for suite in $(SUITES); do \
		$(READABLE) $(PY) -m pytest -q -n 2 --dist loadfile tests/real tests/abuse -m "not alone and not full" --slurm $$suite && \
		$(READABLE) $(PY) -m pytest -q tests/real -m alone --slurm $$suite || exit 1; done

abuse: setup ## what hostile users may try, as a table, on Slurm 22.05, 24.11 and 26.05
	for suite in $(SUITES); do $(READABLE) $(PY) -m pytest -q tests/abuse --slurm $$suite || exit 1; done

chaos: setup ## real faults while 200 jobs of several users come and go on Slurm 24.11; table, and out/chaos.json
	@$(READABLE) $(PY) -m gpushare_lab.chaos

soak: setup ## ten minutes of jobs at full speed: memory, files and threads must level off; out/soak.json
	@$(READABLE) $(PY) -m gpushare_lab.chaos --soak 10 --every 0.8 --out out/soak.json

paper: setup ## the paper's experiment over five seeds, cold and again; table and picture in out/paper
	@$(READABLE) $(PY) -m gpushare_lab demo --policies all --jobs 24 --runs 1 --gpus 4 --spread 1 --seed 0 --seeds 5 --out out/paper $(PAPER_DATA)

# The short stream first: a mistake shows in minutes.
truth: setup ## what is reported of 200 emulated jobs against what they say themselves, on Slurm 24.11; half an hour
	@$(READABLE) $(PY) -m pytest -q -s tests/real/test_truth.py --slurm trixie

bench: setup ## benchmarks; results in out/bench
	$(PY) -m bench

matrix: setup ## every way to ask for GPUs, without us, with us, and with us broken; tables in out/matrix
	for suite in $(SUITES); do $(READABLE) $(PY) scripts/request_matrix.py $$suite out/matrix/$$suite.md || exit 1; done

VENDOR_NEEDS = expect python3-pytest python3-pexpect python3-requests python3-jsondiff python3-jsonpatch python3-yaml
vendor-tests: setup ## SchedMD's own tests on plain Slurm and with us: SLURM_SOURCE=DIR is a source tree of 22.05, 24.11 or 26.05
	dpkg -s $(VENDOR_NEEDS) >/dev/null || apt-get install -y $(VENDOR_NEEDS)
	$(READABLE) $(PY) scripts/vendor_tests.py '$(SLURM_SOURCE)' out/vendor-tests.txt '$(TESTS)'

dist: setup ## the wheel, Debian packages and RPMs, in dist/
	$(PY) packaging/build.py

test-packages: setup ## the packages of dist/ in clean Debians 12 and 13: installed, upgraded, purged
	[ -e dist/slurm-gpushare_*.deb -a -e dist/slurm-gpushare-controller-*.rpm ] || $(PY) packaging/build.py
	for suite in bookworm trixie; do packaging/try_packages.sh $$suite dist || exit 1; done
	packaging/try_rpms.sh dist

afternoon: setup $(ANSIBLE)/.installed ## an administrator's afternoon on a throw-away Slurm: install, roll out, share, upgrade, roll back; then by Ansible
	[ -e dist/slurm-gpushare_*.deb ] || $(PY) packaging/build.py deb
	$(READABLE) $(PY) scripts/afternoon.py dist

reference: setup ## write the man pages and the reference pages from the code
	$(PY) scripts/make_reference.py

DOCS := build/docs-env
$(DOCS)/.installed: requirements/docs.txt | setup
	/usr/bin/python3 -m venv $(DOCS)
	$(DOCS)/bin/pip install -qq --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(ANSIBLE)/.installed: requirements/ansible.txt | setup
	/usr/bin/python3 -m venv $(ANSIBLE)
	$(ANSIBLE)/bin/pip install -qq --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

ansible: $(ANSIBLE)/.installed ## ansible-lint on the role of packaging/ansible
	cd packaging/ansible && ../../$(ANSIBLE)/bin/ansible-lint --offline -q

# Material says at each build that it has a successor.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)/.installed ## docs/ as a searchable site in build/site, strict about links and anchors
	$(DOCS)/bin/mkdocs build --strict >/dev/null 2>build/docs.log || { cat build/docs.log; exit 1; } # --quiet would not count warnings
	@echo "docs: open build/site/index.html"

pypi: $(DOCS)/.installed ## both distributions as sdist and wheel in dist/pypi, with PyPI's own check of what it will show
	rm -rf dist/pypi
	for part in . lab; do $(PY) -m build --no-isolation --outdir dist/pypi $$part >/dev/null || exit 1; done
	$(DOCS)/bin/twine check --strict dist/pypi/*

clean: ## remove what the targets above made, but not .venv
	rm -rf build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
