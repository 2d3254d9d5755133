# PYTHON_ARGCOMPLETE_OK
"""How good can a low-bit model become? Quantisation-aware training (QAT) of a student from its teacher's KD cache.

    python scripts/train_qat.py --config q2_g64 --cache-dir caches/text_L256 --max-steps 300
    python scripts/train_qat.py --config q2_g64 --cache-dir caches/text_L256 --output-dir runs/q2 --resume auto
    python scripts/train_qat.py --config q2_g64 --cache-dir caches/text_L256 --checkpoint runs/q2/best.pt \\
        --layer-steps 0

The student is the low-bit copy of a model, the teacher the original. The teacher's predictions come from the cache that
build_kd_cache.py made, so no update runs the teacher.
Stages: initial scales (--init rtn, mse or gptq) → layer by layer (--layer-steps updates per block) → end to end
(--max-steps).
metrics.jsonl: every --log-every updates loss (cross-entropy against the targets), kl (loss minus the teacher's entropy:
the remaining gap to the teacher; not with --text-weight), grad_norm before clipping, lr, tokens, tokens_per_s; at every
evaluation heldout_kl and heldout_ppl.
The student with the lowest held-out KL is best.pt: packed codes and scales, for train_recovery_lora.py,
measure_perplexity.py, run_inference.py and export_model.py. docs/qat-recovery.md is the runbook.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.models.packaged import CHOICES
from qat_lora.quant.targets import TargetOptions
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import TrainOptions

NAME = "train_qat"
OWN = ("target", "mlp", "attn", "head", "layers", "checkpoint", "layer_steps")  # what --init own decides or rules out


@dataclass(frozen=True, kw_only=True)
class Config(TargetOptions, TrainOptions, JobConfig):
    model: str | None = opt.model(None, f"base model [the cache's teacher]: {CHOICES}", identity="base")
    checkpoint: str | None = opt.model(
        None,
        "start from this student (a best.pt); if it has other quantisers, from the weights it represents",
        "--v2-checkpoint",
        "--from",
        identity="start",
    )
    from_scratch: bool = opt.model(False, "start from the base model, the default without --checkpoint", identity=False)
    cache_dir: str | None = opt.data(
        None,
        "KD cache (folder or URL), made by build_kd_cache.py with this model's tokenizer",
        "--kd-cache-dir",
        identity="cache",
    )
    mlp: str = opt.quantiser(
        "balanced2/g32",
        "quantiser of the MLP layers, CODEBOOKbits/SCALE, e.g. balanced2/g32, or alternatives for layers of other "
        "shapes, q2_k|int2/g64; none leaves them alone",
    )
    attn: str = opt.quantiser("balanced2/g32", "quantiser of the attention projections; none leaves them alone")
    head: str = opt.quantiser("none", "quantiser of the LM head and of an embedding tied to it")
    layers: str | None = opt.quantiser(
        None, "quantisers of single layers, e.g. 0.*=int4/g64,*.down_proj=int3/g64; allocate_bits.py chooses them"
    )
    init: Literal["rtn", "mse", "gptq", "own"] = opt.quantiser(
        "mse",
        "initial scales: rtn (round to nearest), mse (least squared error) or gptq (mse, with error compensation); or "
        "own, the quantisers and scales of a low-bit --model",
    )
    text_weight: float = opt.training(
        0.0,
        "weight of the text's own next token in the targets; the teacher gets the rest. Fits the student to this kind "
        "of text, at the expense of others",
        at_least=0, below=1, fix="use e.g. 0.1",
    )  # fmt: skip
    layer_steps: int = opt.training(0, "updates per block of the layer-wise stage; 0 skips the stage", **opt.UPDATES)
    layer_rows: int = opt.training(32, "training rows used by --init and by the layer-wise stage", at_least=1)
    layer_learning_rate: float | None = opt.training(
        None, "peak learning rate of the layer-wise stage [computed from the weights]", **opt.RATE
    )
    learning_rate: float | None = opt.training(
        None, "peak learning rate [computed from the size of the weights and their bits]", **opt.RATE
    )


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

import dataclasses
from collections.abc import Callable

from torch import nn

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.opening import launch
from qat_lora.backend.sharding import takes_part
from qat_lora.data.batches import first_batches
from qat_lora.errors import UserError
from qat_lora.export.own import own_spec, own_student
from qat_lora.kd.dataset import KDCacheDataset, open_splits, planned_rows, teacher_of
from qat_lora.kd.training import heldout_figures, kd_loss, target_entropy
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.compiling import placed, set_up_blocks
from qat_lora.models.loading import empty_model, load_tokenizer, model_fingerprint
from qat_lora.models.source import planned_name
from qat_lora.quant.calibration import calibrate, check_start, load_start
from qat_lora.quant.rates import usual_rates
from qat_lora.quant.student import StudentSpec, bits_per_weight, megabytes, quantize, save_student
from qat_lora.run.console import command, compared, say
from qat_lora.run.metrics import Share, Total
from qat_lora.run.report import finish
from qat_lora.run.resuming import prepare
from qat_lora.run.rundir import open_run
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, plain_stage, tokens_of
from qat_lora.train.memory import Parts


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    check(cfg)
    cfg = settled(cfg)
    if not cfg.dry_run:
        return launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)
    backend = open_planned(cfg.device, cfg.precision)
    if cfg.checkpoint:
        check_start(cfg.checkpoint, cfg.model, student_spec(cfg), cfg.layer_steps)
    open_rows(cfg, backend, planned_workers(backend.kind, cfg.num_chips))


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    asked, cfg = cfg, prepare(NAME, cfg, backend.group)
    layer_batch = cfg.batch_size * cfg.accumulation_steps // asked.accumulation_steps  # more if there are fewer workers
    with backend.group.main_first():
        train, heldout, shared = open_rows(cfg, backend, backend.world_size)
    facts, trained = facts_of(cfg, train, layer_batch, backend)
    spec, by_block = student_spec(cfg), bool(cfg.layer_steps) or cfg.init == "gptq"
    # before open_run, so that an error leaves no run behind; the other workers get worker 0's values
    start = first_student(cfg, spec, by_block) if backend.is_main else None
    run = open_run(NAME, cfg, facts, backend.group)
    cfg = dataclasses.replace(cfg, **backend.group.on_main(lambda: learning_rates(cfg, start[0])))
    backend.seed(cfg.seed)
    session = Session(run, backend, cfg.every(), files=("best.pt", "layerwise.pt"))
    student = start_student(cfg, *start, train, session) if start else quantize(empty_model(cfg.model), spec)
    student, best, kept = placed(student, backend, shared), session.best("heldout_kl"), run.path / "best.pt"

    def evaluate(step: int) -> dict:
        """Held-out figures; best.pt keeps the student with the lowest KL."""
        done = session.offset + step
        figures = heldout_figures(student, heldout, backend, cfg.batch_size, cfg.eval_rows)
        taken = backend.group.on_main(lambda: best.take(figures, kept.exists()))
        if taken and takes_part(student, backend):
            save_student(kept, student, cfg.model, spec, {"step": done, "trained": trained or done > 0, **figures})
        return figures

    if cfg.layer_steps:
        layer_by_layer(cfg, student, train, layer_batch, session)
    set_up_blocks(student, backend, cfg.gradient_checkpointing, cfg.compile)
    end_to_end(student, train, cfg.plan(), session, evaluate, cfg.text_weight)
    bits, cost = bits_per_weight(student), session.cost()
    if backend.is_main:
        before, _ = run.first_and_best("heldout_kl")
        finish(
            run, {"best": {"heldout_kl": best.value}, "bits_per_weight": bits, **cost},
            {f"student of {bits:.2f} bits per weight": kept},
            [f"held-out KL to the teacher {compared(best.value, before, 'before training')}"],
            command("train_recovery_lora", checkpoint=kept, cache_dir=cfg.cache_dir),
        )  # fmt: skip


def end_to_end(
    student: nn.Module, train: KDCacheDataset, plan: Plan, session: Session, evaluate: Callable, text_weight: float = 0
) -> None:
    """Train the student to predict what the cached teacher predicts, and with a `text_weight` also the text itself.
    Targets are sparse: no batch holds [B, L, V]."""
    backend = session.backend
    student.train()
    for update in plain_stage("qat", student, train, plan, session, evaluate):  # resumes, evaluates, saves in between
        for batch in update:  # its micro-batches, on the device
            with backend.autocast():
                loss = kd_loss(student, batch, text_weight)
            backend.backward(loss)
            gap = {} if text_weight else {"kl": Share(loss - target_entropy(batch))}
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)), **gap)
        norm = update.step()  # reduces over workers, clips, steps
        update.record(grad_norm=norm)


def layer_by_layer(cfg: Config, student: nn.Module, train: KDCacheDataset, batch_size: int, session: Session) -> None:
    """Train each block to match its full-precision original; layerwise.pt keeps the student."""
    backend = session.backend
    rows = first_batches(train, cfg.layer_rows, batch_size, cfg.seed, backend.rank, backend.world_size)
    train_layers(student, rows, layer_plan(cfg), session)
    if takes_part(student, backend) and not session.resumed:  # a run that resumes in a later stage has the file
        save_student(session.run.path / "layerwise.pt", student, cfg.model, student_spec(cfg), {"stage": "layers"})


# -- the steps -------------------------------------------------------------------------------------------------------
def check(cfg: Config) -> None:
    """Raise UserError for options that no run could use, before anything is opened."""
    student_spec(cfg)
    if cfg.from_scratch and cfg.checkpoint:
        raise UserError("give either --from-scratch, to start from the base model, or --checkpoint FILE")
    if not cfg.cache_dir:
        raise UserError(
            "--cache-dir is missing; build a cache with "
            + command("build_kd_cache", model=cfg.model, dataset="TEXT", cache_dir="FOLDER")
        )


def settled(cfg: Config) -> Config:
    """The options with what they leave open: the cache's teacher as the base model, and the quantisers of --target or,
    with --init own, of the model."""
    if not cfg.model:
        cfg = dataclasses.replace(cfg, model=teacher_of(cfg.cache_dir))
        say(f"base model {cfg.model}: the teacher of {cfg.cache_dir}")
    cfg = dataclasses.replace(cfg, **cfg.for_target("mlp", "attn"))
    if cfg.init != "own":
        return cfg
    spec = own_spec(cfg.model, *[name for name in OWN if getattr(cfg, name) != getattr(Config, name)])
    return dataclasses.replace(cfg, **{name: text or None for name, text in vars(spec).items()})


def student_spec(cfg: Config) -> StudentSpec:
    return StudentSpec(mlp=cfg.mlp, attn=cfg.attn, head=cfg.head, layers=cfg.layers or "")


def open_rows(cfg: Config, backend: TorchBackend, workers: int) -> tuple[KDCacheDataset, KDCacheDataset, bool]:
    """The training and held-out rows of the cache, and whether the workers share the student out. Prints the plan of
    the run, and checks that it fits in memory."""
    from qat_lora.export.gguf import export_formats  # bring modules that nothing else here needs
    from qat_lora.export.targets import check_target

    train, heldout = open_splits(cfg.cache_dir, cfg.model, load_tokenizer(cfg.model))
    cfg.check_rows(train, heldout, workers)
    spec = student_spec(cfg)
    model = quantize(empty_model(cfg.model), spec)
    say(f"{cfg.model} → {spec}: {bits_per_weight(model):.2f} bits per weight, {megabytes(model):.1f} MB, on {backend}")
    say(f"cache {cfg.cache_dir}: {len(train)} training and {len(heldout)} held-out rows of {train.length} tokens")
    stages = f"{cfg.layer_steps} updates for each of {len(decoder_layers(model))} blocks, {cfg.max_steps} end to end"
    say(f"start: {cfg.checkpoint or cfg.init}; {stages}")
    say(check_target(cfg.target, cfg.model, model) if cfg.target else export_formats(cfg.model))
    return train, heldout, cfg.describe(model, train, backend, workers)


def facts_of(cfg: Config, train: KDCacheDataset, layer_batch: int, backend: TorchBackend) -> tuple[dict, bool]:
    """The inputs of the run, for its manifest, and whether it starts from trained codes."""
    spec, group = student_spec(cfg), backend.group
    facts = backend.facts | {"cache": train.fingerprint, "student": str(spec)}
    facts["base"] = group.on_main(lambda: model_fingerprint(cfg.model))
    facts |= cfg.update_facts(backend.world_size)
    trained = cfg.init == "own"
    if cfg.checkpoint:
        facts["start"], trained = group.on_main(lambda: check_start(cfg.checkpoint, cfg.model, spec, cfg.layer_steps))
    if cfg.layer_steps:  # an update of that stage is one batch per worker
        facts["layer_rows_per_update"] = layer_batch * backend.world_size
    return facts, trained


def learning_rates(cfg: Config, student: nn.Module) -> dict[str, float]:
    """Both learning rates: the given one, or one computed from the student's weights before its scales are set."""
    usual, usual_by_layer = usual_rates(student)
    rate, by_layer = cfg.learning_rate or usual, cfg.layer_learning_rate or usual_by_layer
    say(f"peak learning rate {rate:g}" + (f", layer by layer {by_layer:g}" if cfg.layer_steps else ""))
    return {"learning_rate": rate, "layer_learning_rate": by_layer}


def first_student(cfg: Config, spec: StudentSpec, by_block: bool) -> tuple[nn.Module, bool]:
    """The student before training, and whether its scales are set."""
    if cfg.init == "own":
        return own_student(cfg.model, spec), True
    return load_start(cfg.checkpoint, cfg.model, spec, by_block)


def start_student(
    cfg: Config, student: nn.Module, has_scales: bool, train: KDCacheDataset, session: Session
) -> nn.Module:
    """The student of `load_start`, with initial scales if they are not set."""
    if not session.resumed and not has_scales:
        # With a layer-wise stage, GPTQ runs in that stage, on the outputs of the trained blocks before each block.
        rows = first_batches(train, cfg.layer_rows, cfg.batch_size, cfg.seed)
        calibrate(student, cfg.init, rows, cfg.precision, blocks=not cfg.layer_steps)
    return student


def layer_plan(cfg: Config) -> LayerPlan:
    """The plan of the layer-wise stage. cfg: with all learning rates resolved."""
    return LayerPlan(
        steps=cfg.layer_steps, learning_rate=cfg.layer_learning_rate, clip_grad_norm=cfg.clip_grad_norm,
        compensate=cfg.init == "gptq",
    )  # fmt: skip


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    model has no weights, and all rows are zeros."""
    rows = planned_rows(cfg.cache_dir, cfg.update_facts(backend.world_size)["rows_per_update"])
    rates = dict.fromkeys(("learning_rate", "layer_learning_rate"), 1e-3)
    cfg = dataclasses.replace(settled(cfg), **rates)
    session = backend.rehearsal(len(rows) * len(rows[0]["tokens"]))
    student = backend.place(quantize(empty_model(planned_name(cfg.model)), student_spec(cfg)))

    def evaluate(step: int) -> dict:
        return heldout_figures(student, rows, backend, cfg.batch_size, cfg.batch_size)

    if cfg.layer_steps:
        train_layers(student, first_batches(rows, cfg.batch_size, cfg.batch_size, cfg.seed), layer_plan(cfg), session)
    set_up_blocks(student, backend, cfg.gradient_checkpointing, cfg.compile)
    end_to_end(student, rows, cfg.plan(), session, evaluate, cfg.text_weight)
    return cfg.memory(student, len(rows[0]["tokens"]), backend)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
