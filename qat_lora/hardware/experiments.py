"""Every experiment, at tiny size and at the size of its presets, for the checks that rehearse it."""

from contextlib import nullcontext
from pathlib import Path

from qat_lora.ahead.trial import Trial, open_trial, same_noise
from qat_lora.run.scripts import load_script, read_options

SCRIPTS = {
    "teacher cache": "build_kd_cache", "QAT": "train_qat", "recovery": "train_recovery_lora",
    "SFT and GRPO": "train_musclebob_improved", "legal SFT": "train_cot_sft",
    "reservoir": "train_tinystories_reservoir", "Athena": "pretrain",
}  # fmt: skip
TINY = {
    "teacher cache": "--length 64 --batch-size 4 --cache-dir caches/none",
    "QAT": "--cache-dir caches/none_L64_K8 --batch-size 4 --accumulation-steps 2 --layer-steps 5",
    "recovery": "--cache-dir caches/none_L64_K8 --batch-size 4 --accumulation-steps 2",
    "SFT and GRPO": "--sft --sft-batch-size 4 --batch-size 2 --num-generations 4 --max-prompt-length 32 "
    "--max-new-tokens 8",
    "legal SFT": "--length 64 --batch-size 4 --answer-rows 2 --max-prompt-length 32 --max-new-tokens 8 "
    "--lora-dropout 0",
    "reservoir": "--embedding 32 --blocks 1 --reservoirs diagonal:16 --length 32 --batch-size 8 --tokenizer chars "
    "--dropout 0",
    "Athena": "--puzzle sudoku4 --global-batch-size 32 --hidden-size 32 --num-heads 2 --halt-max-segments 2 "
    "--compile off --learning-rate 1e-6",
}
QWEN = "--model Qwen/Qwen3-0.6B"
REAL = {
    "teacher cache": f"{QWEN} --length 1024 --top-k 128 --batch-size 8 --cache-dir caches/none",
    "QAT": f"{QWEN} --config q4_r32 --cache-dir caches/none_L1024_K128 --batch-size 8 --accumulation-steps 1",
    "recovery": f"{QWEN} --config v6e1 --checkpoint none/best.pt --cache-dir caches/none_L1024_K128 --batch-size 8 "
    "--accumulation-steps 1",
    "SFT and GRPO": "--config cuda --sft",
    "legal SFT": "--config v5e8 --accumulation-steps 1",
    "reservoir": "--config cuda",
    "Athena": "--config trm --data-path none/sudoku9",
}
LANGUAGE_MODELS = ("QAT", "recovery", "legal SFT")  # whose step is timed beside plain fine-tuning's


def options(name: str, size: str, model: Path, *more: str):
    """(the script of an experiment as a module, its options at `size`, tiny or real, and `more` of them)."""
    words = [*(TINY if size == "tiny" else REAL)[name].split(), *more]
    takes_model = size == "tiny" and name not in ("reservoir", "Athena")
    module = load_script(SCRIPTS[name])
    return module, read_options(module, [*words, *(["--model", str(model)] if takes_model else [])], None)


def tried(name: str, size: str, model: Path, device: str, precision: str, *more: str, **how) -> Trial:
    """The backend after an experiment's updates on a device; more: options; how: see `Trial.start`. Its attribute
    `estimate` is the dry run's."""
    module, config = options(name, size, model, *more)
    backend = open_trial(device, precision)
    backend.start(**how)
    backend.seed(0)
    with same_noise() if how.get("same_draws") else nullcontext():
        backend.estimate = module.rehearse(config, backend)
    return backend
