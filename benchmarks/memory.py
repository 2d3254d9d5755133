"""How well does --dry-run predict the memory of a script? Compares its estimate with the measured peak of the process.

    python benchmarks/memory.py --folder /tmp/memory
    python benchmarks/memory.py --folder /tmp/memory --models gemma3-270m --stages qat,recovery

For each model (of benchmarks/shapes.py, a folder or a .gguf file), each stage runs with --dry-run and then in full, in
its own process: two updates of its default batch, with an evaluation before and after, and a checkpoint. The peak is
the largest resident set, including interpreter and libraries. Models, caches and students stay in --folder and are
reused. Everything takes about twenty minutes on two cores.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import shapes

from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

ROOT = Path(__file__).resolve().parents[1]
TOTAL = re.compile(r"^memory.* total (\d+\.\d+) GB", re.MULTILINE)
ROWS = "--length 256 --max-rows 20 --heldout-fraction 0.2"
TRAIN = "--max-steps 2 --eval-rows 4 --log-every 1"
SCRIPTS = {  # stage → script and its options; {…}: folder of the model, of this stage or of an earlier one
    "cache": f"build_kd_cache --model {{model}} --dataset embedded {ROWS} --cache-dir {{cache}}",
    "qat": "train_qat --model {model} --cache-dir {cache} --output-dir {qat} --layer-rows 4 " + TRAIN,
    "recovery": "train_recovery_lora --checkpoint {qat}/best.pt --kd-cache-dir {cache} --output-dir {recovery} "
    + TRAIN,
    "evaluation": "measure_perplexity --checkpoint {qat}/best.pt --teacher {model} --dataset embedded --max-windows 8",
    "sft": "train_cot_sft --model {model} --output-dir {sft} --count 48 --epochs 1 --eval-answers 4 "
    "--final-answers 0 --log-every 1",
    "grpo": "train_musclebob_improved --model {model} --output-dir {grpo} --num-samples 6 --epochs 1 --sft "
    "--sft-epochs 1 --sft-batch-size 4 --validation-samples 1 --max-prompt-length 128",
}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    folder: str = option("/tmp/qat_lora_memory", "folder for models, caches and runs")
    models: str = option("smollm2-135m,qwen3-0.6b,gemma3-270m", "names in benchmarks/shapes.py, folders or .gguf files")
    stages: str = option(",".join(SCRIPTS), "stages to measure; earlier stages must have run")


def main(cfg: Config) -> None:
    for stage in (stages := cfg.stages.split(",")):
        if stage not in SCRIPTS:
            raise UserError(f"--stages {stage!r} is not one of {', '.join(SCRIPTS)}")
    print(f"commit {revision()}\n")
    print("| stage | model | estimate GB | measured GB | estimate / measured |\n|---|---|---|---|---|")
    for model in cfg.models.split(","):
        name = model if model in shapes.CONFIGS else Path(model).stem
        folder = Path(cfg.folder) / name
        places = {place: folder / place for place in (*SCRIPTS, "model")}
        if model in shapes.CONFIGS and not places["model"].exists():
            shapes.make_model(model, places["model"])
        elif model not in shapes.CONFIGS:
            places["model"] = Path(model).absolute()
        for stage in stages:
            if not cfg.dry_run:
                subprocess.run(["rm", "-rf", places[stage]], check=True)
            script, *words = SCRIPTS[stage].format(**places).split()
            words = [sys.executable, ROOT / "scripts" / f"{script}.py", *words, "--device", cfg.device]
            estimate = TOTAL.findall(run([*words, "--dry-run"])[0])
            said = float(estimate[-1]) if estimate else float("nan")
            peak = float("nan") if cfg.dry_run else run(words)[1] / 1e9
            print(f"| {stage} | {name} | {said:.2f} | {peak:.2f} | {said / peak:.2f} |", flush=True)


def run(words: list) -> tuple[str, int]:
    """Run a command; return its output and the largest resident set of its process, in bytes."""
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{' '.join(map(str, words))} failed: {said.strip().splitlines()[-1]}")
    return said, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    run_script(main, Config, "memory", __doc__)
