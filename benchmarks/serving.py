"""What does a low-bit file cost to serve? Size, tokens per second and peak memory in llama.cpp and in transformers.

    PYTHONPATH=.venv/peers python benchmarks/serving.py

Students of --model are made from its weights by rounding, since speed does not depend on their quality, and exported
once to --folder. Every measurement has its own process, which reads a prompt of 256 tokens and generates 64; those of
a round follow each other, so that ratios compare neighbours. transformers reads 16 bits from an fp32 folder in bf16,
and low bits from compressed-tensors, which it unpacks when it loads them.
"""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from qat_lora.errors import UserError, load_package
from qat_lora.hosts.revision import revision
from qat_lora.models.loading import EMBEDDED, empty_model, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize, save_student
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

EXPORT = Path(__file__).resolve().parents[1] / "scripts" / "export_model.py"
KINDS = {  # quantiser, and the type of its GGUF file
    "16 bits": ("", "F16"), "4 bits": ("int4/g32", "Q4_0"), "2 bits": ("int2/g64", "Q2_0"),
    "2 bits in Q4_0": ("int2/g64", "Q4_0"), "ternary": ("ternary/g64", "Q2_0"), "4 bits, k-quant": ("q4_k", "Q4_K"),
    "2 bits, k-quant": ("q2_k", "Q2_K"), "ternary, 256": ("ternary/g256", "TQ2_0"),
}  # fmt: skip
PACKED = ("16 bits", "4 bits", "2 bits", "ternary")  # in transformers, too
PROMPT, NEW, WEIGHTS = 256, 64, (".gguf", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = option(EMBEDDED, "model to serve")
    rounds: int = option(5, "measurements of each file", at_least=1)
    threads: int = option(2, "threads of each engine", at_least=1)
    folder: str = option("runs/serving", "folder for the exports")
    side: str | None = option(None, "only measure ENGINE:FOLDER in this process, and print JSON")


def main(cfg: Config) -> None:
    if cfg.side:
        engine, _, folder = cfg.side.partition(":")
        return print(json.dumps({"llama.cpp": llama_cpp, "transformers": in_transformers}[engine](folder, cfg.threads)))
    sides = {("llama.cpp", what): export(cfg, what, "gguf") for what in KINDS if fits(cfg.model, what)}
    sides |= {("transformers", what): export(cfg, what, "compressed-tensors") for what in PACKED}
    found = {side: [] for side in sides}
    for _ in range(cfg.rounds):
        for (engine, what), folder in sides.items():
            words = [sys.executable, __file__, "--side", f"{engine}:{folder}", "--threads", str(cfg.threads)]
            said = subprocess.run(words, stdout=subprocess.PIPE, text=True)
            if said.returncode:
                raise UserError(f"{' '.join(words)} failed")
            found[engine, what].append(json.loads(said.stdout.splitlines()[-1]))
        show(cfg, sides, found)  # after each round, since a round takes minutes


def show(cfg: Config, sides: dict, found: dict) -> None:
    rounds = len(found["llama.cpp", "16 bits"])
    print(f"{cfg.model}, {cfg.threads} threads, {rounds} rounds, commit {revision()}\n")
    print("| engine | weights | MB | prompt, tokens/s | generated, tokens/s | / 16 bits | peak MB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (engine, what), rows in found.items():
        size = sum(file.stat().st_size for file in sides[engine, what].iterdir() if file.suffix in WEIGHTS) / 1e6
        ratio = [row["new"] / base["new"] for row, base in zip(rows, found[engine, "16 bits"])]
        figures = [spread([row[key] for row in rows]) for key in ("prompt", "new")]
        peak = median(row["peak"] for row in rows)
        print(f"| {engine} | {what} | {size:.1f} | {' | '.join(figures)} | {spread(ratio, 2)} | {peak:.0f} |")


def spread(values: list[float], digits: int = 0) -> str:
    """Median (smallest–largest)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def fits(model: str, what: str) -> bool:
    """Whether a model's layers have the shapes that a quantiser needs."""
    grid = KINDS[what][0]
    try:
        return not grid or bool(quantize(empty_model(model), StudentSpec(grid, grid)))
    except UserError:
        return False


def export(cfg: Config, what: str, name: str) -> Path:
    """The folder of an export in format `name`, made if it is not there; of 16 bits a model folder or an F16 file."""
    grid, kind = KINDS[what]
    folder = Path(cfg.folder) / f"{what.replace(' ', '-')}-{name}"
    if folder.exists():
        return folder
    file = Path(cfg.folder) / "student.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not grid and name != "gguf":
        load_model(cfg.model).save_pretrained(folder)
        return folder
    flags = ["--model", cfg.model]
    if grid:
        spec = StudentSpec(grid, grid)
        student = quantize(load_model(cfg.model), spec)
        initialise(student, search=False)
        save_student(file, student, cfg.model, spec, {})
        flags = ["--checkpoint", str(file)]
    flags += ["--gguf-type", kind] if name == "gguf" else []
    subprocess.run([sys.executable, EXPORT, *flags, "--format", name, "--output-dir", folder], check=True)
    return folder


# -- one engine, in a process of its own -----------------------------------------------------------------------------
def llama_cpp(folder: str, threads: int) -> dict:
    llama = load_package("llama_cpp", "serving", "", "llama-cpp-python")
    model = llama.Llama(
        f"{folder}/model.gguf", n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    begun = time.perf_counter()
    model.eval(list(range(100, 100 + PROMPT)))
    read = time.perf_counter()
    for _ in range(NEW):
        model.eval([model.sample(temp=0.0)])
    return figures(begun, read)


@torch.no_grad()
def in_transformers(folder: str, threads: int) -> dict:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = torch.arange(100, 100 + PROMPT)[None]
    begun = time.perf_counter()
    held = model(tokens, use_cache=True, logits_to_keep=1)
    read = time.perf_counter()
    for _ in range(NEW):
        held = model(held.logits[:, -1:].argmax(-1), past_key_values=held.past_key_values, use_cache=True)
    return figures(begun, read)


def figures(begun: float, read: float) -> dict:
    ended = time.perf_counter()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3  # of this program alone
    return {"prompt": PROMPT / (read - begun), "new": NEW / (ended - read), "peak": peak}


if __name__ == "__main__":
    run_script(main, Config, "serving", __doc__)
