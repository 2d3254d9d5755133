"""How close do our students come to their teacher, compared with other methods for the same tokens, grid and bits?

    python benchmarks/qat_quality.py --config quick                                # small: one grid, one seed
    python benchmarks/qat_quality.py --dataset wiki.txt --other-dataset tales.txt  # hours; the same command resumes

A cell is one grid, method and seed. Each cell runs in its own process and appends its rows to results.jsonl in
--output-dir. Finished cells are not run again, and interrupted ones resume. After each cell the table and the plot are
rewritten. Methods train on the first nine tenths of --dataset, from a cache of the teacher that is built once. PPL and
the exact KL(teacher‖student) are measured on the rest and on --other-dataset, in fp32, in windows of 512 tokens.

  rtn, mse, gptq  no training (train_qat.py --init)
  loftq           alternating rounding and SVD (arXiv 2310.08659), then the adapter alone
  torchao         its QAT: scales from the largest weight, recomputed at every step; from the same cached targets
  torchao-text    the same from the text alone, with cross-entropy, as torchao documents it
  autoround       AutoRound's recipes, 200 or 50 updates a block, also with its extension: autoround, autoround-light,
                  autoround-ext, autoround-light-ext
  ours            GPTQ and layer-wise, end to end: one row per stage
  llama.cpp       its own quantiser on the same grid, with and without an importance matrix of the calibration rows
  ranks           recovery LoRA on `ours`, an eighth more tokens: ranks 4 to 32 with about equally many values, on
                  different layers

All methods that train see the same number of tokens of the same rows, the first of the text, and `ranks` an eighth
more. Those run by train_qat.py use its optimiser, the others plain AdamW. Adapters (rank 4 except in `ranks`) count at
16 bits per value.
"""

import ctypes
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from quality_bench import ADAPTER_RATE, BATCH, Bench, Clock, core_seconds
from quality_report import write_report
from torch import Tensor, nn

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.options import TextSource
from qat_lora.data.packing import Rows, fingerprint, given_token, stream, tokenizer_fingerprint, window_starts, windowed
from qat_lora.errors import UserError, load_package
from qat_lora.export.gguf import MODEL_FILE, plan_gguf, write_gguf
from qat_lora.export.gguf_file import tensor_names
from qat_lora.export.gguf_types import TYPES, fitting
from qat_lora.export.source import load_source
from qat_lora.hosts.revision import revision
from qat_lora.kd.cache import CacheSpec, edges, write_cache
from qat_lora.kd.training import kd_loss
from qat_lora.lora.add import add_adapter, nearest_of_rank
from qat_lora.lora.targets import PROJECTIONS
from qat_lora.models.architecture import hidden_states
from qat_lora.models.loading import EMBEDDED, empty_model, load_config, load_model
from qat_lora.models.packaged import CHOICES, notes
from qat_lora.quant.init import initialise, input_moments
from qat_lora.quant.linear import freeze, full_precision, quantized_layers
from qat_lora.quant.spec import NAMES, QuantSpec
from qat_lora.quant.student import StudentSpec, freeze_plain_tables, quantize
from qat_lora.run.command_line import run_script
from qat_lora.run.files import lock, read_json, write_atomically, write_json
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.evaluation import text_figures, windows
from qat_lora.train.losses import text_loss

METHODS = (
    "rtn", "mse", "gptq", "loftq", "torchao", "torchao-text", "autoround-light", "autoround-light-ext", "autoround",
    "autoround-ext", "ours", "ranks", "llama.cpp",
)  # fmt: skip
AUTOROUND = {"autoround": {"iters": 200}, "autoround-light": {"iters": 50, "lr": 5e-3}}  # recipes of its own
AUTOROUND_ROWS = 128  # its default
LENGTH, WINDOW, RANK, LEAST = 256, 512, 4, 24  # LEAST: updates, of which `ours` makes a sixth layer by layer
STAGE_FILES = (  # of `ours`: each stage, the student after it, and the file that is written when the stage ends
    ("layers", "layerwise.pt", "layerwise.pt"),
    ("qat", "best.pt", "summary.json"),
)
RANKS = {4: PROJECTIONS, 8: ("v", "gate", "up"), 16: ("down",), 32: ("o",)}


@dataclass(frozen=True, kw_only=True)
class Config(TextSource, ScriptConfig):
    model: str = option(EMBEDDED, f"model to quantise, which is also the teacher: {CHOICES}")
    other_dataset: str | None = option(None, "a text of another kind, used for measuring only")
    grids: str = option("int2/g64,int2/g32,int4/g32,int4/g96", "quantisers of MLP and attention, to compare")
    methods: str = option(",".join(name for name in METHODS if name != "llama.cpp"), "methods to compare")
    seeds: str = option("0,1", "seeds for the order of the rows")
    steps: int = option(488, "updates of 4×256 tokens at 2 bits (by default half a million tokens)")
    steps_4bit: int = option(96, "updates at 4 bits")
    calibration_rows: int = option(64, "rows used to initialise scales and GPTQ")
    measured: int = option(12, "windows to measure in each text")
    output_dir: str = option("runs/qat_quality", "folder for the cache, the results, the table and the plot")
    cell: str | None = option(None, "run only this cell: GRID,METHOD,SEED")


def main(cfg: Config) -> None:
    cells = check(cfg)
    backend = open_backend(cfg.device, cfg.precision)
    out = Path(cfg.output_dir)
    print(f"{cfg.model} on {backend}, commit {revision()}, {len(cells)} cells → {out}", flush=True)
    if cfg.dry_run:
        return print("\n".join(cells))
    if cfg.cell:
        return run_cell(cfg, backend, out)
    held = lock(out)
    prepare(cfg, backend, out)
    done = {row["cell"] for row in results(out)}
    for cell in cells:
        if cell in done:
            continue
        print(cell, flush=True)
        code = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--cell", cell]).returncode
        if code:  # the cell has printed its error
            raise SystemExit(code)
        report(cfg, backend, out)
    report(cfg, backend, out)
    held.close()


def report(cfg: Config, backend: TorchBackend, out: Path) -> None:
    note = f" Note: {said}." if (said := notes(cfg.model)) else ""
    write_report(results(out), out, f"{cfg.model} on {backend}.{note}")


def results(out: Path) -> list[dict]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def check(cfg: Config) -> list[str]:
    """Refuse impossible settings, and return the cells."""
    for name, least in (("steps", LEAST), ("steps_4bit", LEAST), ("calibration_rows", BATCH), ("measured", BATCH)):
        if getattr(cfg, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least {least}")
    for method in cfg.methods.split(","):
        if method not in METHODS:
            raise UserError(f"--methods {method!r} is not one of {', '.join(METHODS)}")
    for grid in cfg.grids.split(","):
        spec = QuantSpec.parse(grid)
        if spec is None or spec.scale != "group" or spec.bits not in ADAPTER_RATE:
            raise UserError(f"--grids {grid} is not a group quantiser of 2 or 4 bits; use e.g. int2/g64")
        for name in ("torchao", "autoround"):
            if (spec.codebook, spec.offset, spec.narrow) != ("int", False, 0) and name in cfg.methods:
                raise UserError(f"--grids {grid}: {name} has int grids alone; leave {name} out of --methods")
        if "llama.cpp" in cfg.methods and str(spec) not in NAMES.values():
            raise UserError(
                f"--grids {grid}: llama.cpp has no type of this grid; use {', '.join(NAMES)}, or leave it out"
            )
        quantize(empty_model(cfg.model), StudentSpec(grid, grid))  # refuses groups that do not divide its widths
    if not all(seed.isdecimal() for seed in cfg.seeds.split(",")):
        raise UserError(f"--seeds {cfg.seeds} is not a list of whole numbers; use e.g. 0,1")
    seeds, methods, grids = (text.split(",") for text in (cfg.seeds, cfg.methods, cfg.grids))
    cells = [f"{g},{m},{s}" for g in grids for s in seeds for m in methods]
    if cfg.cell and cfg.cell not in cells:
        raise UserError(f"--cell {cfg.cell} is not a cell of --grids, --methods and --seeds; --dry-run lists them")
    return cells


# -- text, cache, measuring ------------------------------------------------------------------------------------------
def texts(cfg: Config) -> tuple[Rows, dict[str, tuple]]:
    """Training rows and, for each measured text, its windows and how many tokens of each window are scored."""
    tokenizer = cfg.tokenizer(cfg.model)
    bos = cfg.bos_token(tokenizer)
    tokens, _ = stream(cfg.documents(tokenizer), tokenizer, bos=bos)
    edge = len(tokens) * 9 // 10
    rows = windowed(tokens, window_starts(tokens[:edge], LENGTH, LENGTH, bos), LENGTH, bos)
    measured = {"text": windows(tokens[edge:], WINDOW, WINDOW, cfg.measured, bos)}
    if cfg.other_dataset:
        source = TextSource(dataset=cfg.other_dataset)
        other, _ = stream(source.documents(tokenizer), tokenizer, cfg.measured * WINDOW, bos)
        measured["other"] = windows(other, WINDOW, WINDOW, cfg.measured, bos)
    return Rows(rows, torch.ones_like(rows, dtype=torch.uint8), given_token(tokenizer, bos)), measured


def prepare(cfg: Config, backend: TorchBackend, out: Path) -> None:
    """Make what all cells share: the teacher's cache, which holds out a fiftieth of the rows to choose the best state,
    and the windows to measure, with the teacher's own figures."""
    rows, measured = texts(cfg)
    names = ("model", "steps", "steps_4bit", "calibration_rows", "measured", "precision")
    read = b"".join(tokens.numpy().tobytes() for tokens in [rows.tokens, *(tokens for tokens, _ in measured.values())])
    check_settings({name: getattr(cfg, name) for name in names} | {"text": hashlib.sha256(read).hexdigest()}, out)
    if (out / "measured.pt").exists():
        return
    heldout = max(2 * BATCH, len(rows) // 50)
    kept, tokenizer = min(len(rows) - heldout, BATCH * max(cfg.steps, cfg.steps_4bit)), cfg.tokenizer(cfg.model)
    rows = Rows(*(torch.cat([part[:kept], part[-heldout:]]) for part in (rows.tokens, rows.mask)), rows.given)
    spec = CacheSpec(
        teacher=cfg.model, tokenizer=tokenizer_fingerprint(tokenizer), text=fingerprint(rows),
        precision=backend.precision, length=LENGTH, k=8, draws=12,
        vocab=load_config(cfg.model).vocab_size, seed=0, rows_per_shard=64, train_rows=kept, heldout_rows=heldout,
        **edges(cfg.bos_token(tokenizer), tokenizer),
    )  # fmt: skip
    (out / "cache").mkdir(exist_ok=True)
    started, teacher = time.monotonic(), backend.place(load_model(cfg.model))
    sides = {"train": slice(None, kept), "heldout": slice(kept, None)}
    parts = {name: Rows(rows.tokens[side], rows.mask[side]) for name, side in sides.items()}
    for _ in write_cache(out / "cache", spec, parts, teacher, backend, BATCH):
        pass
    print(f"cache of {len(rows)} rows: {time.monotonic() - started:.0f} s", flush=True)
    exact = open_backend(cfg.device, "fp32")
    content = {
        name: text_figures(teacher, tokens, scored, exact, BATCH, given=rows.given)
        | {"tokens": tokens, "scored": scored, "given": rows.given}
        for name, (tokens, scored) in measured.items()
    }
    write_atomically(out / "measured.pt", lambda file: torch.save(content, file))


def check_settings(settings: dict, out: Path) -> None:
    """Raise UserError if the results in the folder were made with other settings."""
    path = out / "settings.json"
    there = read_json(path) if path.exists() else settings
    for name, value in settings.items():
        if there.get(name) != value:
            raise UserError(f"{out} holds results with {name} {there.get(name)}, not {value}; use another --output-dir")
    write_json(path, settings)


# -- the methods -----------------------------------------------------------------------------------------------------
def run_cell(cfg: Config, backend: TorchBackend, out: Path) -> None:
    bench = Bench(cfg, backend, out)
    backend.seed(bench.seed)
    trained = {
        "loftq": loftq, "torchao": torchao, "torchao-text": torchao, "ours": ours,
        "ranks": ranks, "llama.cpp": llama_cpp,
    } | dict.fromkeys((m for m in METHODS if m.startswith("autoround")), autoround)  # fmt: skip
    rows = trained.get(bench.method, no_training)(bench)
    with (out / "results.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def no_training(bench: Bench) -> list[dict]:
    run, summary = bench.qat(init=bench.method)
    return [bench.measure(bench.student(run / "best.pt"), bench.method, summary["peak_memory_mb"])]


def loftq(bench: Bench) -> list[dict]:
    base = bench.base()
    student = quantize(bench.base(), bench.spec)
    factors = {}
    for name, layer in quantized_layers(student).items():
        weight, left = base.get_submodule(name).weight.detach(), torch.zeros(())
        for _ in range(5):
            layer.weight.data.copy_(weight - left)
            initialise(layer)
            error = weight - layer.quantizer.decode(layer.quantizer.encode(layer.weight))
            factors[name] = nearest_of_rank(error, RANK)  # no input moment: LoftQ uses the weights only
            left = factors[name][0] @ factors[name][1]
    del base
    freeze(student)
    model = add_adapter(student.requires_grad_(False), RANK, RANK, PROJECTIONS, bench.seed)
    for name, (b, a) in factors.items():
        layer = model.get_submodule(f"base_model.model.{name}")
        layer.lora_A["default"].weight.data.copy_(a)
        layer.lora_B["default"].weight.data.copy_(b)
    bench.backend.place(model)
    bench.fit(model, kd_loss, ADAPTER_RATE[bench.bits])
    return [bench.measure(model, "adapter", bench.backend.peak_memory_mb())]


def torchao(bench: Bench) -> list[dict]:
    try:
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    except ImportError as error:
        raise UserError(f"torchao cannot be imported ({error}); make bench-quality installs it") from error
    model, spec = bench.base(), QuantSpec.parse(bench.grid)
    rate = bench.rate(model)
    config = IntxFakeQuantizeConfig(getattr(torch, f"int{spec.bits}"), group_size=spec.size, is_symmetric=True)
    layers = QATConfig(weight_config=config, step="prepare")
    quantize_(model, layers, filter_fn=lambda m, name: isinstance(m, nn.Linear) and "lm_head" not in name)
    bench.backend.place(freeze_plain_tables(model))
    loss_of = text_loss if bench.method == "torchao-text" else kd_loss
    bench.fit(model, loss_of, rate)
    return [bench.measure(model, "qat", bench.backend.peak_memory_mb())]


def autoround(bench: Bench) -> list[dict]:
    package = load_package("auto_round", "--methods autoround", ", or leave it out", "auto-round")
    model, spec, rows = bench.base(), QuantSpec.parse(bench.grid), bench.calibration(AUTOROUND_ROWS)
    model.config.save_pretrained(bench.folder)
    # AutoRound looks the name up, on the hub if it is no folder
    model.name_or_path = model.config._name_or_path = str(bench.folder)
    trained = package.AutoRound(
        model, bench.cfg.tokenizer(bench.cfg.model), dataset=list(rows.split(8)), nsamples=len(rows), seqlen=LENGTH,
        scheme={"bits": spec.bits, "group_size": spec.size, "sym": True, "data_type": "int"}, batch_size=8,
        seed=bench.seed, device_map="cpu", amp=bench.backend.precision != "fp32", enable_torch_compile=False,
        enable_alg_ext=bench.method.endswith("-ext"), **AUTOROUND[bench.method.removesuffix("-ext")],
    )  # fmt: skip
    model = trained.quantize()[0].float()
    cost, memory = bench.clock.cost(), bench.backend.peak_memory_mb()
    scales = {name: layer.scale for name, layer in model.named_modules() if getattr(layer, "scale", None) is not None}
    student = quantize(model, bench.spec)
    near = 0 if bench.backend.precision == "fp32" else 2**-8  # with amp its weights are rounded to bf16
    for name, layer in quantized_layers(student).items():  # its codes and scales are exact in our grid
        quantizer = layer.quantizer
        quantizer.scale.data.copy_(scales[name].float().view_as(quantizer.scale))
        torch.testing.assert_close(quantizer.decode(quantizer.encode(layer.weight)), layer.weight, rtol=near, atol=0)
    return [bench.measure(student, "autoround", memory, cost)]


def ours(bench: Bench) -> list[dict]:
    layers = min(20, bench.steps // 6)  # for each block, on as many tokens as end to end
    run, summary = bench.qat(init="gptq", layer_steps=layers, max_steps=bench.steps - layers)
    return [
        bench.measure(bench.student(run / file), stage, summary["peak_memory_mb"], bench.clock.cost(run / ended))
        for stage, file, ended in STAGE_FILES
    ]


def ranks(bench: Bench) -> list[dict]:
    student = bench.folder.with_name(bench.folder.name.replace("ranks", "ours")) / "qat" / "best.pt"
    if not student.exists():
        raise UserError(f"{student} is missing; ranks needs method ours of the same grid and seed, so run that first")
    rows = []
    for rank, targets, init in [*((r, t, "zero") for r, t in RANKS.items()), (RANK, PROJECTIONS, "error")]:
        bench.clock = Clock(bench.clock.whole, core_seconds())
        model, summary = bench.adapter(student, bench.folder / f"{rank}-{init}", rank, targets, adapter_init=init)
        rows.append(bench.measure(model, f"{rank} on {' '.join(targets)}, from {init}", summary["peak_memory_mb"]))
    return rows


def llama_cpp(bench: Bench) -> list[dict]:
    kind = fitting(QuantSpec.parse(bench.grid), 256)[0]
    student, rows = quantize(bench.base(), bench.spec), bench.calibration(bench.cfg.calibration_rows)

    with full_precision(student):
        moments = input_moments(student, lambda: hidden_states(student, rows))
    whole = bench.folder / "whole"
    if not whole.exists():
        source = load_source(None, None, bench.cfg.model)
        whole.mkdir()
        write_gguf(source, plan_gguf(source), whole, whole)
        del source
    found = []
    for stage, importance in (("plain", {}), ("importance matrix", moments)):
        file = bench.folder / f"{kind}-{stage}.gguf"
        quantise_gguf(bench.cfg.model, whole / MODEL_FILE, file, kind, importance)
        found.append(bench.measure(load_model(str(file)), stage, bench.backend.peak_memory_mb()))
    return found


def quantise_gguf(name: str, source: Path, target: Path, kind: str, importance: dict[str, Tensor]) -> None:
    """Quantise the F16 file of a model to one GGUF type with llama.cpp, its embedding apart. importance: the mean
    square of each input of a layer, by its name."""
    llama = load_package("llama_cpp", "--methods llama.cpp", ", or leave it out", "llama-cpp-python")
    names = tensor_names(name, [f"{layer}.weight" for layer in importance])
    values = {names[f"{layer}.weight"]: moment.float().contiguous() for layer, moment in importance.items()}
    entry, pointer = llama.llama_model_imatrix_data, ctypes.POINTER(ctypes.c_float)
    rows = [entry(n.encode(), ctypes.cast(v.data_ptr(), pointer), v.numel()) for n, v in values.items()]
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.pure, params.token_embedding_type = TYPES[kind].file_type, True, TYPES["F16"].number
    if rows:
        params.imatrix = (entry * (len(rows) + 1))(*rows)  # ends with an empty one
    llama._logger.set_verbose(False)
    if llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise UserError(f"llama.cpp could not quantise {source} to {kind}")


if __name__ == "__main__":
    run_script(main, Config, "qat_quality", __doc__)
