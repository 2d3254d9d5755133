"""A recovery LoRA on a low-bit student: options and steps of train_recovery_lora.py and its _multi twin."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qat_lora.backend import TorchBackend, launch, open_backend, planned_workers
from qat_lora.data.batches import batches
from qat_lora.data.options import TextOptions
from qat_lora.data.packing import split_heldout, tokenizer_fingerprint
from qat_lora.data.templates import template_facts
from qat_lora.errors import UserError
from qat_lora.evaluate import heldout_figures, heldout_nll
from qat_lora.export import export_formats
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.memory import Parts, loading_memory
from qat_lora.models.adapter import adapter_values
from qat_lora.models.architecture import unwrap
from qat_lora.models.loading import adapter_notes, check_length, load_config, load_model, model_fingerprint
from qat_lora.models.targets import coverage, left_out
from qat_lora.qat import MOST_WEIGHT, TrainOptions, check_range
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import StudentSpec, bits_per_weight, empty_student, load_student, read_student
from qat_lora.recovery import (
    MODES,
    Anchor,
    TextDataset,
    add_adapter,
    save_adapter,
    start_from_error,
    train_recovery_lora,
)
from qat_lora.run.config import option
from qat_lora.run.files import sha256
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import attempt, begun, open_run, prepare, say
from qat_lora.run.session import Session

NAME = "train_recovery_lora"
CALIBRATION_ROWS = 32
ANCHOR = 5  # tensors like its logits that the anchor takes: kept ones, new ones, softmax, log softmax, gradient


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, TrainOptions):
    checkpoint: str | None = option(None, "student: the best.pt of train_qat.py", identity="student")
    v2_checkpoint: str | None = option(None, "the same as --checkpoint", identity="student")
    model: str | None = option(
        None, "the student's base model, if it has moved: folder, .gguf file or hub name", identity="base"
    )
    mode: str = option("kd", "kd (from a cache), sft (chat rows, completions only) or recover (plain text)")
    kd_cache_dir: str | None = option(None, "KD cache of mode kd", identity="data")
    recovery_r: int = option(8, "rank")
    adapter_init: str = option("zero", "zero, or error: the low-rank matrix nearest to what quantisation lost")
    recovery_alpha: float | None = option(None, "LoRA alpha; default: the rank")
    targets: str = option(
        "auto", "layers with an adapter: auto (all but k_proj), all, attn, mlp, experts, or names",
        renamed={"q,v,o,gate,up,down": "auto"},
    )  # fmt: skip
    mlp_only: bool = option(False, "adapters on the MLP only, whatever --targets says")
    anchor_weight: float = option(0.0, "weight of the KL to the student without adapter")
    anchor_rows: int = option(4, "rows of the anchor")
    anchor_length: int = option(64, "tokens of an anchor row")
    max_steps: int = option(200, "updates")
    heldout_fraction: float = option(0.1, "share of the text rows kept for evaluation (sft, recover)")


def main(cfg: Config) -> None:
    check(cfg)
    if cfg.dry_run:
        backend = open_backend(cfg.device, cfg.precision)
        made, workers = read_made(cfg), planned_workers(backend.kind, cfg.num_chips)
        train, _ = open_data(cfg, made["model"], cfg.tokenizer(made["model"], begun(NAME, cfg)), workers)
        return describe(cfg, adapted(cfg, empty_student(made)), made, train, backend, workers)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, in each of its workers."""
    cfg = prepare(NAME, cfg, backend.group)
    plan, checkpoint = cfg.plan(), student_path(cfg)
    made = backend.group.on_main(lambda: read_made(cfg))
    tokenizer = cfg.tokenizer(made["model"], begun(NAME, cfg, backend.group))
    with backend.group.main_first():
        train, heldout = open_data(cfg, made["model"], tokenizer, backend.world_size)
    describe(cfg, adapted(cfg, empty_student(made)), made, train, backend, backend.world_size)
    # the others get their values from worker 0
    student = load_student(checkpoint, cfg.model)[0] if backend.is_main else empty_student(made)
    model = adapted(cfg, student)

    fingerprint = backend.group.on_main(lambda: sha256(checkpoint))
    facts = backend.facts | {"student": fingerprint, "data": train.fingerprint}
    facts |= template_facts(tokenizer, cfg.chat_template)
    facts["base"] = backend.group.on_main(lambda: model_fingerprint(made["model"]))
    run = open_run(NAME, cfg, facts | cfg.update_facts(backend.world_size), backend.group)
    backend.seed(cfg.seed)
    session = Session(run, backend, cfg.every(), files=("adapter",))
    if backend.is_main and cfg.adapter_init == "error" and not session.resumed:
        start_from_error(model, load_model(made["model"]), first_batches(cfg, train), cfg.precision)
    backend.place(model)
    anchor = make_anchor(cfg, model, train, backend)
    if cfg.gradient_checkpointing:
        backend.gradient_checkpointing(model)

    figure = "heldout_kl" if cfg.mode == "kd" else "heldout_nll"
    best, adapter = session.best(figure), run.path / "adapter"

    def evaluate(step: int) -> dict:
        measure = heldout_figures if cfg.mode == "kd" else heldout_nll
        figures = measure(model, heldout, backend, cfg.batch_size, cfg.eval_rows)
        if backend.is_main and best.take(figures, adapter.exists()):
            save_adapter(model, adapter, fingerprint)
        return figures

    train_recovery_lora(model, train, cfg.mode, plan, anchor, session, evaluate)
    cost = session.cost()
    if backend.is_main:
        bits = bits_per_weight(student, adapter_values(model))
        attempt("plotting", plot_run, run.path)
        run.finish("finished", best={figure: best.value}, bits_per_weight=bits, **cost)
        say(f"best {figure} {best.value:.4f}; adapter in {adapter}")


def check(cfg: Config) -> None:
    if bool(cfg.checkpoint) == bool(cfg.v2_checkpoint):
        raise UserError("give the student's best.pt as either --checkpoint or --v2-checkpoint")
    if cfg.adapter_init not in ("zero", "error"):
        raise UserError(f"--adapter-init {cfg.adapter_init!r} is not one of zero, error")
    if cfg.mode not in MODES:
        raise UserError(f"--mode {cfg.mode!r} is not one of {', '.join(MODES)}")
    check_range("--anchor-weight", cfg.anchor_weight, 0, MOST_WEIGHT)
    if cfg.anchor_rows < 1 or cfg.anchor_length < 2:
        raise UserError(
            f"--anchor-rows {cfg.anchor_rows} must be at least 1 and --anchor-length {cfg.anchor_length} at least 2"
        )
    if cfg.mode == "kd" and not cfg.kd_cache_dir:
        raise UserError("--mode kd needs --kd-cache-dir; build one with scripts/build_kd_cache.py")
    cfg.plan(), cfg.every()


def student_path(cfg: Config) -> Path:
    return Path(cfg.checkpoint or cfg.v2_checkpoint)


def read_made(cfg: Config) -> dict:
    """What the student's file says of itself."""
    content = read_student(student_path(cfg), cfg.model)
    return {key: content[key] for key in ("model", "spec")}


def adapted(cfg: Config, student):
    """The student with a new adapter."""
    alpha = cfg.recovery_r if cfg.recovery_alpha is None else cfg.recovery_alpha
    targets = ("mlp",) if cfg.mlp_only else tuple(target.strip() for target in cfg.targets.split(","))
    return add_adapter(student, cfg.recovery_r, alpha, targets, cfg.seed)


def open_data(cfg: Config, model_name: str, tokenizer, workers: int):
    """Training and held-out data of the mode."""
    if cfg.mode == "kd":
        facts = {"tokenizer": tokenizer_fingerprint(tokenizer), "vocab": load_config(model_name).vocab_size}
        data = [KDCacheDataset(cfg.kd_cache_dir, split, **facts) for split in ("train", "heldout")]
    else:
        check_length(model_name, cfg.length)
        rows = cfg.rows(tokenizer)
        if cfg.mode == "sft" and bool(rows.mask.all()):
            raise UserError(f"--mode sft: {cfg.dataset} has no chat rows, so no completions; use --mode recover")
        parts = split_heldout(rows, cfg.heldout_fraction)
        if not len(parts[1]):
            raise UserError(f"--heldout-fraction {cfg.heldout_fraction} leaves no row to measure on; use e.g. 0.1")
        data = [TextDataset(rows, completions_only=cfg.mode == "sft") for rows in parts]
    cfg.check_rows(*data, workers)
    return data


def first_batches(cfg: Config, train) -> list[dict]:
    """The rows that an adapter is fitted on before training."""
    stream = batches(train, cfg.batch_size, 1, cfg.seed)
    return [next(stream) for _ in range(max(1, min(CALIBRATION_ROWS, len(train)) // cfg.batch_size))]


def make_anchor(cfg: Config, model, train, backend: TorchBackend) -> Anchor | None:
    if not cfg.anchor_weight:
        return None
    tokens = torch.stack([train[i]["tokens"][: cfg.anchor_length] for i in range(min(cfg.anchor_rows, len(train)))])
    with model.disable_adapter():
        return Anchor.of(model, tokens, cfg.anchor_weight, backend)


def describe(cfg: Config, model, made: dict, train, backend: TorchBackend, workers: int) -> None:
    """The resolved plan."""
    values = adapter_values(model)
    say(f"{made['model']} as {StudentSpec(**made['spec'])} on {backend}")
    bits = bits_per_weight(model, values)
    say(f"adapter: {coverage(model)}, {values} values, {bits:.2f} bits per weight with it")
    for line in (*left_out(model, "; --targets auto,experts adapts them too"), *adapter_notes(made["model"])):
        say(line)
    say(f"{cfg.max_steps} updates of mode {cfg.mode} on {len(train)} rows")
    untrained = made.get("info", {}).get("trained") is False
    say("export: none, for the checkpoint is untrained" if untrained else export_formats(made["model"]))
    cfg.check_memory(model, train, backend, workers)
    for line in cfg.describe(model, train, backend, workers, *memory(cfg, model)):
        say(line)


def memory(cfg: Config, model) -> tuple[Parts, dict[str, Parts]]:
    """What the anchor holds in training, and the phase that fits an adapter to the error."""
    vocab = unwrap(model).get_output_embeddings().weight.shape[0]
    anchor = {"anchor": ANCHOR * 4 * cfg.anchor_rows * cfg.anchor_length * vocab} if cfg.anchor_weight else {}
    if cfg.adapter_init != "error":
        return anchor, {}
    moments = sum(
        4 * layer.in_features**2 for layer in quantized_layers(model).values() if isinstance(layer, nn.Linear)
    )
    base = 4 * sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    return anchor, {"fitting the adapter": loading_memory(model) | {"base model": base, "second moments": moments}}
