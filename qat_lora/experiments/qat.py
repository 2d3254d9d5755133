"""Low-bit QAT from a KD cache: options and steps of train_qat.py and train_v2_tpu_multi.py."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from qat_lora.backend import TorchBackend, launch, open_backend, planned_workers
from qat_lora.blocks import check_blocks
from qat_lora.data.batches import batches
from qat_lora.data.packing import tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.evaluate import heldout_figures
from qat_lora.export import export_formats
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.loading import EMBEDDED, empty_model, load_config, load_model, load_tokenizer, model_fingerprint
from qat_lora.models.source import CHOICES
from qat_lora.qat import MOST_UPDATES, QATPlan, TrainOptions, check_range, train_qat, usual_rates
from qat_lora.quant.linear import free_scales
from qat_lora.quant.student import (
    StudentSpec,
    bits_per_weight,
    load_student,
    megabytes,
    quantize,
    read_student,
    reload_student,
    save_student,
    thaw,
    unquantised,
)
from qat_lora.run.config import option
from qat_lora.run.files import copy_file, sha256
from qat_lora.run.hosts import shared_file
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import Run, attempt, open_run, prepare, read_config, say
from qat_lora.run.session import Session
from qat_lora.start import METHODS, start

NAME = "train_qat"
EARLIER_RATES = (6e-4, 1e-4)  # of presets, when rates did not follow from the weights


@dataclass(frozen=True, kw_only=True)
class Config(TrainOptions):
    model: str = option(EMBEDDED, f"base model: {CHOICES}", identity="base")
    v2_checkpoint: str | None = option(
        None,
        "student to start from, a best.pt of --model; if its quantisers differ (e.g. 4 bits): from its weights",
        "--from",
        identity="start",
    )
    cache_dir: str | None = option(
        None, "KD cache made by build_kd_cache.py with this model's tokenizer", identity="cache"
    )
    mlp: str = option(
        "balanced2/g32", "quantiser of the MLP: CODEBOOKbits/SCALE, e.g. balanced2/g32 or lut4/r32; or none"
    )
    attn: str = option("balanced2/g32", "quantiser of the attention projections")
    head: str = option("none", "quantiser of the LM head (and of an embedding tied to it)")
    init: str = option(
        "mse", "the start: rtn (plain rounding), mse (least-error scales) or gptq (and errors compensated)"
    )
    layer_steps: int = option(0, "updates for each block before end-to-end training; 0 leaves the stage out")
    layer_rows: int = option(32, "training rows of the start and of the layer-wise stage")
    layer_learning_rate: float | None = option(
        None,
        "peak learning rate of the layer-wise stage; default: follows from the weights too",
        renamed=dict.fromkeys((5e-4, *EARLIER_RATES)),
    )
    scope: str = option("all", "what learns end to end: all, mlp, attn, or weights (scales stay)")
    ema: float = option(0.0, "decay of a moving average of the student, measured and kept in its place; 0: none")
    scale_steps: int = option(0, "updates of the scales alone, codes fixed, from the best state; 0: no such stage")
    layer_kd_weight: float = option(0.0, "weight of a global distillation term in the layer-wise loss")
    learning_rate: float | None = option(
        None,
        "peak learning rate of weights and norms; default: follows from the size of the weights and their bits",
        renamed=dict.fromkeys((8e-4, *EARLIER_RATES)),
    )
    scale_learning_rate: float | None = option(None, "peak learning rate of scales; default: --learning-rate")


def main(cfg: Config) -> None:
    check(cfg)
    if cfg.dry_run:
        backend = open_backend(cfg.device, cfg.precision)
        workers = planned_workers(backend.kind, cfg.num_chips)
        if cfg.v2_checkpoint:
            check_start(cfg)
        return describe(cfg, *open_cache(cfg, workers), backend, workers)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, in each of its workers."""
    asked, cfg = cfg, prepare(NAME, cfg, backend.group)
    layer_batch = cfg.batch_size * cfg.accumulation_steps // asked.accumulation_steps  # more if workers are fewer
    spec = student_spec(cfg)
    with backend.group.main_first():
        train, heldout = open_cache(cfg, backend.world_size)
        describe(cfg, train, heldout, backend, backend.world_size)
    facts = backend.facts | {"cache": train.fingerprint, "student": str(spec)}
    facts["base"] = backend.group.on_main(lambda: model_fingerprint(cfg.model))
    facts |= cfg.update_facts(backend.world_size)
    trained = False
    if cfg.v2_checkpoint:
        facts["start"], trained = backend.group.on_main(lambda: check_start(cfg))
    if cfg.layer_steps:  # an update of that stage is one batch for each worker
        facts["layer_rows_per_update"] = layer_batch * backend.world_size
    loaded = load_start(cfg, spec) if backend.is_main else None  # what is wrong with it leaves no run behind
    run = open_run(NAME, cfg, facts, backend.group)
    rates = backend.group.on_main(lambda: find_rates(cfg, loaded[0], run))
    cfg = dataclasses.replace(cfg, **rates)
    plan = qat_plan(cfg)
    backend.seed(cfg.seed)
    session = Session(run, backend, cfg.every(), files=("best.pt", "layerwise.pt", "endtoend.pt"))
    if backend.is_main:
        student = first_student(loaded, cfg, train, session.resumed is not None)
    else:
        student = quantize(empty_model(cfg.model), spec)  # gets its values from worker 0
    backend.place(student)

    calibration = []
    if cfg.layer_steps:
        calibration = first_batches(train, cfg.layer_rows, layer_batch, cfg.seed, backend.rank, backend.world_size)
    train_layers(student, calibration, layer_plan(cfg), session)
    if backend.is_main and cfg.layer_steps and not session.resumed:
        save_student(run.path / "layerwise.pt", student, cfg.model, spec, {"stage": "layers"})
    if cfg.gradient_checkpointing:
        backend.gradient_checkpointing(student)

    best, kept = session.best("heldout_kl"), run.path / "best.pt"

    def evaluate(step: int, model) -> dict:
        figures = heldout_figures(model, heldout, backend, cfg.batch_size, cfg.eval_rows)
        if backend.is_main and best.take(figures, kept.exists()):
            done = session.offset + step
            save_student(kept, model, cfg.model, spec, {"step": done, "trained": trained or done > 0, **figures})
        return figures

    train_qat(student, train, plan, session, evaluate)
    if cfg.scale_steps:
        thaw_scales(student, run.path, backend)
        plan = dataclasses.replace(
            plan,
            steps=cfg.scale_steps,
            scope="all",
            learning_rate=plan.scale_learning_rate,  # the one that is logged
        )
        train_qat(student, train, plan, session, evaluate, stage="scales")
    cost = session.cost()
    if backend.is_main:
        attempt("plotting", plot_run, run.path)
        run.finish("finished", best={"heldout_kl": best.value}, bits_per_weight=bits_per_weight(student), **cost)
        say(f"best held-out KL {best.value:.4f}; student in {kept}")


def check(cfg: Config) -> None:
    """Raise UserError for what no run could use, before anything is opened."""
    some = dataclasses.replace(cfg, **fill_rates(cfg, 1e-3, 1e-3))  # the weights, which it may follow from, come later
    student_spec(cfg), qat_plan(some), cfg.every(), layer_plan(some)
    check_range("--scale-steps", cfg.scale_steps, 0, MOST_UPDATES)
    if cfg.layer_rows < 1:
        raise UserError(f"--layer-rows {cfg.layer_rows} must be at least 1")
    if cfg.init not in METHODS:
        raise UserError(f"--init {cfg.init!r} is not one of {', '.join(METHODS)}")
    if not cfg.cache_dir:
        raise UserError("--cache-dir is missing; build one with scripts/build_kd_cache.py")


def student_spec(cfg: Config) -> StudentSpec:
    return StudentSpec(mlp=cfg.mlp, attn=cfg.attn, head=cfg.head)


def find_rates(cfg: Config, student, run: Run) -> dict[str, float]:
    """Every learning rate: those that are given; those of a resumed run that an earlier version began, whose defaults
    were numbers; and what follows from a student's weights, its scales not set yet."""
    was = read_config(run.path)
    kept = {name: was[name] for name in ("learning_rate", "layer_learning_rate") if was.get(name) is not None}
    rates = fill_rates(dataclasses.replace(cfg, **kept), *usual_rates(student))
    layers = f", layer by layer {rates['layer_learning_rate']:g}" if cfg.layer_steps else ""
    say(f"peak learning rate {rates['learning_rate']:g}{layers}")
    return rates


def fill_rates(cfg: Config, end_to_end: float, layerwise: float) -> dict[str, float]:
    """Every learning rate of a config, with what to take where none is given; scales learn as weights do."""
    rate = end_to_end if cfg.learning_rate is None else cfg.learning_rate
    return {
        "learning_rate": rate,
        "layer_learning_rate": layerwise if cfg.layer_learning_rate is None else cfg.layer_learning_rate,
        "scale_learning_rate": rate if cfg.scale_learning_rate is None else cfg.scale_learning_rate,
    }


def qat_plan(cfg: Config) -> QATPlan:
    """Of a config with all its learning rates."""
    return QATPlan(**vars(cfg.plan()), scale_learning_rate=cfg.scale_learning_rate, scope=cfg.scope, ema=cfg.ema)


def layer_plan(cfg: Config) -> LayerPlan:
    """Of a config with all its learning rates."""
    return LayerPlan(
        steps=cfg.layer_steps, learning_rate=cfg.layer_learning_rate, clip_grad_norm=cfg.clip_grad_norm,
        kd_weight=cfg.layer_kd_weight, compensate=cfg.init == "gptq",
    )  # fmt: skip


def open_cache(cfg: Config, workers: int) -> tuple[KDCacheDataset, KDCacheDataset]:
    facts = {"tokenizer": tokenizer_fingerprint(load_tokenizer(cfg.model)), "vocab": load_config(cfg.model).vocab_size}
    train, heldout = (KDCacheDataset(cfg.cache_dir, split, **facts) for split in ("train", "heldout"))
    cfg.check_rows(train, heldout, workers)
    return train, heldout


def describe(cfg: Config, train, heldout, backend: TorchBackend, workers: int) -> None:
    """The resolved plan."""
    spec = student_spec(cfg)
    model = quantize(empty_model(cfg.model), spec)
    say(f"{cfg.model} → {spec}: {bits_per_weight(model):.2f} bits per weight, {megabytes(model):.1f} MB, on {backend}")
    say(f"cache {cfg.cache_dir}: {len(train)} training and {len(heldout)} held-out rows of {train.length} tokens")
    stages = f"{cfg.layer_steps} updates for each of {len(decoder_layers(model))} blocks, {cfg.max_steps} end to end"
    say(f"start: {cfg.v2_checkpoint or cfg.init}; {stages}, {cfg.scale_steps} of the scales alone")
    say(export_formats(cfg.model))
    cfg.check_memory(model, train, backend, workers)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for line in cfg.describe(model, train, backend, workers, {"moving average": 4 * trained} if cfg.ema else None):
        say(line)


def check_start(cfg: Config) -> tuple[str, bool]:
    """The checksum of --v2-checkpoint, and whether the run continues from trained codes; raises UserError where it is
    no student of this model."""
    made = read_student(cfg.v2_checkpoint, cfg.model)
    same = StudentSpec(**made["spec"]) == student_spec(cfg)
    if same and cfg.layer_steps:
        raise UserError(
            f"--layer-steps {cfg.layer_steps}: {cfg.v2_checkpoint} has these quantisers, so its blocks have nothing to "
            "learn from but themselves; use --layer-steps 0"
        )
    return sha256(Path(cfg.v2_checkpoint)), same and made["info"].get("trained") is not False


def load_start(cfg: Config, spec: StudentSpec):
    """The student where training begins, and whether it has its scales: the base model, or another run's student."""
    student, made = load_student(cfg.v2_checkpoint, cfg.model) if cfg.v2_checkpoint else (None, None)
    if made and StudentSpec(**made["spec"]) == spec:
        return thaw(student), True
    base = unquantised(student) if made else load_model(cfg.model)
    if cfg.layer_steps or cfg.init == "gptq":
        check_blocks(base)
    return quantize(base, spec), False


def first_student(loaded: tuple, cfg: Config, train, resumed: bool):
    """What `load_start` gave, with fresh scales where it has none of these quantisers."""
    student, has_scales = loaded
    if not resumed and not has_scales:
        # with a layer-wise stage GPTQ waits for it: each block is compensated on what the trained ones before it give
        calibration = first_batches(train, cfg.layer_rows, cfg.batch_size, cfg.seed)
        start(student, cfg.init, calibration, cfg.precision, blocks=not cfg.layer_steps)
    return student


def thaw_scales(student, folder: Path, backend: TorchBackend) -> None:
    """The best state of the stages before, its codes fixed, its scales to be learned; endtoend.pt keeps it."""
    best, before = folder / "best.pt", folder / "endtoend.pt"
    backend.group.on_main(lambda: before.exists() or copy_file(best, before))
    with shared_file(before, backend.group) as file:
        reload_student(file, student)
    free_scales(student)


def first_batches(train, rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> list[dict]:
    """One worker's whole batches of `rows` training rows in all workers, chosen by the seed."""
    stream = batches(train, batch_size, 1, seed, 0, rank, world_size)
    return [next(stream) for _ in range(max(1, min(rows, len(train)) // (batch_size * world_size)))]
