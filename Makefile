# make demo   train one model as single, ddp, pipeline and tensor, and compare them
# make test   the whole suite        make lint   ruff and mypy        make venv   the environment alone
# make parity   every mix of the parity matrix on real ranks (some ten minutes); writes tests/parity/RESULT.md
#
# PYTHON=path uses the environment of that python as it is: nothing is made or installed.
# pip's own variables are honoured, such as PIP_INDEX_URL or PIP_EXTRA_INDEX_URL.

ifdef PYTHON
python := $(PYTHON)
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
environment := check
else
python := .venv/bin/python
environment := .venv/installed
endif

# A folder of its own: the same command in the same folder would find its jobs done.
demo := runs/demo-$(shell date +%Y-%m-%d-%H-%M-%S)

.PHONY: demo test parity lint venv check

demo: $(environment)
	$(python) -m shardlab train -m experiment=demo strategy=single,ddp,pipeline,tensor hydra.sweep.dir=$(demo)
	@echo
	$(python) -m shardlab compare $(demo)
	@echo
	@echo "The same in pictures: $(python) -m mlflow ui, then open http://127.0.0.1:5000"

test: $(environment)
	$(python) -m pytest

parity: $(environment)
	$(python) tests/parity/run_matrix.py

lint: $(environment)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

check:
	@$(python) -c "import hydra, mlflow, pytest, torch, torchdata, torchtext" 2>/dev/null || \
		(echo "$(python) lacks packages of shardlab: leave PYTHON away, or pip install -c constraints.txt -e '.[dev]'" && exit 1)

venv: .venv/installed

# torch first and by its exact version: what comes after then finds it in place.
.venv/installed: setup.cfg constraints.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install "$$(grep "^torch==" constraints.txt)"
	.venv/bin/python -m pip install -c constraints.txt -e ".[dev]"
	touch .venv/installed
