"""Does each reader get what was trained? A student's perplexity and answers here and in the library that serves it.

    PYTHONPATH=.venv/peers python benchmarks/served.py                                       # SmolLM2-135M, an hour
    PYTHONPATH=.venv/peers python benchmarks/served.py --model runs/small_llama --grids q2_k,q4_k,ternary/g256

Each grid gives one student, which starts from GPTQ. It is exported to every format that holds it exactly, whose files
are read back code by code, and then loaded by llama.cpp, transformers (compressed-tensors) and mlx-lm. A row has the
file's size over the computed one, the perplexity of --windows windows of 512 tokens in the reader over ours in fp32,
and how many of --answers greedy answers of 32 tokens are the same. llama.cpp rounds the inputs of a product to 8 bits;
`emulated` is its perplexity over ours with that rounding. Appends to rows.jsonl in --output-dir; finished grids are
not run again.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from qat_lora.data.options import TextSource
from qat_lora.data.packing import stream
from qat_lora.errors import UserError, load_package
from qat_lora.export.gguf import plan_gguf, stored_bits, write_gguf
from qat_lora.export.packed import FILE, plan_packed, write_packed
from qat_lora.export.source import Source, load_source
from qat_lora.export.targets import LAYOUTS
from qat_lora.hosts.revision import revision
from qat_lora.models.loading import EMBEDDED, load_model
from qat_lora.quant.calibration import calibrate
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import StudentSpec, quantize, save_student
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

WINDOW, NEW, ROWS = 512, 32, 16
GRIDS = "int2/g64,ternary/g64,int4/g32+offset,int4/g32,balanced4/g32,int8/g32,int2/g64+offset"
# Gives logits [tokens, vocabulary] of tokens, which continue those of earlier calls if `more` is true.
Reader = Callable[[list[int], bool], Tensor]


@dataclass(frozen=True, kw_only=True)
class Config(TextSource, ScriptConfig):
    model: str = option(EMBEDDED, "model to quantise")
    grids: str = option(GRIDS, "quantisers of MLP and attention; or trained students, as files")
    formats: str = option("gguf,compressed-tensors,mlx", "formats to write and read")
    windows: int = option(8, "windows to measure")
    answers: int = option(10, "greedy answers to compare", at_least=1)
    output_dir: str = option("runs/served", "folder for rows.jsonl")


def main(cfg: Config) -> None:
    out, tokenizer = Path(cfg.output_dir), cfg.tokenizer(cfg.model)
    out.mkdir(parents=True, exist_ok=True)
    tokens, _ = stream(cfg.documents(tokenizer), tokenizer)
    tokens = tokens.long()
    if len(tokens) < (need := (max(cfg.answers, ROWS) + cfg.windows) * WINDOW):
        raise UserError(f"the text has {len(tokens):,} tokens, {need:,} are needed; lower --answers or --windows")
    edge = len(tokens) - cfg.windows * WINDOW
    rows = tokens[: ROWS * WINDOW].view(-1, 4, WINDOW)
    held = tokens[edge:].view(-1, WINDOW).tolist()
    starts = [row[: 16 + place] for place, row in enumerate(tokens[: cfg.answers * WINDOW].view(-1, WINDOW).tolist())]
    path = out / "rows.jsonl"
    done = {json.loads(line)["grid"] for line in path.read_text().splitlines()} if path.exists() else set()
    for grid in cfg.grids.split(","):
        if grid in done:
            continue
        file = Path(grid) if grid.endswith(".pt") else new_student(cfg.model, grid, rows, out / "best.pt")
        found = [row for name in cfg.formats.split(",") if (row := compare(name, file, out, held, starts))]
        found = [{"model": cfg.model, "grid": grid, "commit": revision()} | row for row in found]
        with path.open("a") as lines:
            lines.write("".join(json.dumps(row) + "\n" for row in found))
        for row in found:
            print(
                " | ".join(f"{value:.5f}" if isinstance(value, float) else str(value) for value in row.values()),
                flush=True,
            )


def new_student(model: str, grid: str, rows: Tensor, file: Path) -> Path:
    spec = StudentSpec(grid, grid)
    student = quantize(load_model(model), spec)
    calibrate(student, "gptq", [{"tokens": batch} for batch in rows], "fp32")
    save_student(file, student, model, spec, {})
    return file


def compare(name: str, file: Path, out: Path, held: list[list[int]], starts: list[list[int]]) -> dict | None:
    """One row of results; None if the format does not hold the student exactly."""
    source, folder = load_source(file), out / "export"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kinds, computed, bits, written = (export_gguf if name == "gguf" else export_packed)(name, source, folder)
    if not kinds:
        return None
    ours = source.student.eval()
    exact, mine = perplexity(plain(ours), held), answers(plain(ours), starts)
    if name == "gguf":
        for layer in quantized_layers(ours).values():
            kind = kinds[layer.quantizer]
            layer.register_forward_pre_hook(rounding_inputs(256 if "K" in kind or "TQ" in kind else 32))
        emulated = perplexity(plain(ours), held)
    shown = "+".join(sorted(set(kinds.values())))
    del source, ours, kinds
    reader = {"gguf": in_llama_cpp, "mlx": in_mlx}.get(name, in_transformers)(folder)
    theirs = perplexity(reader, held)
    same = sum(a == b for a, b in zip(answers(reader, starts), mine))
    return {
        "format": name, "type": shown, "bits": bits, "mb": written / 1e6, "size / computed": written / computed,
        "ppl": exact, "ppl in the reader / ours": theirs / exact,
        "emulated": theirs / emulated if name == "gguf" else None, "same answers": same,
    }  # fmt: skip


def export_gguf(_, source: Source, folder: Path) -> tuple[dict, int, float, int]:
    """The type of each quantiser, none if the format does not hold the student; the computed size, bits, and size."""
    plan = plan_gguf(source)
    kinds = {entry.quantizer: entry.kind for entry in plan.entries if entry.quantizer}
    if "F16" in kinds.values():
        return {}, 0, 0, 0
    write_gguf(source, plan, folder, folder)
    return kinds, plan.model_bytes, stored_bits(plan), (folder / "model.gguf").stat().st_size


def export_packed(name: str, source: Source, folder: Path) -> tuple[dict, int, float, int]:
    """As `export_gguf`; also gives the student's other weights the values that the file has, in fp16."""
    try:
        plan = plan_packed(source, LAYOUTS[name])
    except UserError:
        return {}, 0, 0, 0
    write_packed(source, plan, folder, folder)
    source.student.load_state_dict({key: value.float() for key, value in plan.plain.items()}, strict=False)
    return {None: name}, plan.bytes(), plan.bits(), (folder / FILE).stat().st_size


# -- readers ---------------------------------------------------------------------------------------------------------
def plain(model: nn.Module) -> Reader:
    cache = None

    @torch.no_grad()
    def logits(tokens, more=False):
        nonlocal cache
        cache = cache if more else DynamicCache(config=model.config)
        return model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0].float()

    return logits


def in_transformers(folder: Path) -> Reader:
    from transformers import AutoModelForCausalLM

    return plain(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def in_llama_cpp(folder: Path) -> Reader:
    llama = load_package("llama_cpp", "--formats gguf", ", or leave it out", "llama-cpp-python")
    file = str(folder / "model.gguf")
    model = llama.Llama(file, n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)

    def logits(tokens, more=False):
        if not more:
            model.reset()
        start = model.n_tokens
        model.eval(tokens)
        return torch.tensor(model.scores[start : model.n_tokens])

    return logits


def in_mlx(folder: Path) -> Reader:
    mx, library = (load_package(name, "--formats mlx", ", or leave it out") for name in ("mlx.core", "mlx_lm"))
    model = library.load(str(folder))[0]
    model.set_dtype(mx.float32)
    cache = None

    def logits(tokens, more=False):
        nonlocal cache
        cache = cache if more else library.models.cache.make_prompt_cache(model)
        return torch.tensor(model(mx.array([tokens]), cache=cache).astype(mx.float32).tolist())[0]

    return logits


# -- figures ---------------------------------------------------------------------------------------------------------
def rounding_inputs(size: int) -> Callable:
    """A hook that rounds a layer's inputs as llama.cpp does: in blocks of 32 with an fp16 step, or of 256 with an fp32
    step, with 127 steps up to the largest."""

    def hook(_, args):
        blocks = args[0].reshape(*args[0].shape[:-1], -1, size)
        step = blocks.abs().amax(-1, keepdim=True) / 127
        used = step.half().float() if size == 32 else step
        return (((blocks / step.clamp(min=1e-30)).round() * used).view_as(args[0]),)

    return hook


def perplexity(logits: Reader, rows: list[list[int]]) -> float:
    total = 0.0
    for row in rows:
        found = logits(row).log_softmax(-1)
        total -= found[:-1].gather(1, torch.tensor(row[1:])[:, None]).mean().item()
    return exp(total / len(rows))


def answers(logits: Reader, starts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of NEW tokens."""
    found = []
    for start in starts:
        tokens, seen = [], start
        for more in range(NEW):
            tokens.append(int(logits(seen, more > 0)[-1].argmax()))
            seen = tokens[-1:]
        found.append(tokens)
    return found


if __name__ == "__main__":
    run_script(main, Config, "served", __doc__)
