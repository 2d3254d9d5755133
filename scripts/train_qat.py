"""How good can a low-bit student become? Quantisation-aware training from a KD cache; the teacher is never loaded.

    python scripts/train_qat.py --config q2_g32 --cache-dir caches/text_L256 --max-steps 300
    python scripts/train_qat.py --config q2_g32 --cache-dir caches/text_L256 --output-dir runs/v2_q4 --resume auto

Stages: least-error scales → layer by layer (--layer-steps updates a block) → end to end (--max-steps). A line in
metrics.jsonl every --log-every steps: loss (cross-entropy against the cached teacher), kl (loss minus the teacher's
entropy: what is left to win), grad_norm before clipping, lr, tokens, tokens_per_s. The state of lowest held-out KL is
kept as best.pt: packed codes and scales, for train_recovery_lora.py, measure_perplexity.py and run_inference.py.
"""

from dataclasses import dataclass

import torch

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.packing import tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.evaluate import heldout_figures
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.memory import empty_model
from qat_lora.models.loading import EMBEDDED, decoder_layers, hidden_states, load_config, load_model, load_tokenizer
from qat_lora.qat import TrainOptions, train_qat
from qat_lora.quant.init import METHODS, initialise, input_moments
from qat_lora.quant.linear import unquantized
from qat_lora.quant.student import StudentSpec, bits_per_weight, megabytes, quantize, save_student
from qat_lora.run.config import option, run_script
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import open_run, say
from qat_lora.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Config(TrainOptions):
    model: str = option(EMBEDDED, "base model: smollm2-135m (embedded), a local folder, or a hub name")
    cache_dir: str | None = option(None, "KD cache made by build_kd_cache.py with this model's tokenizer")
    mlp: str = option(
        "balanced2/g32", "quantiser of the MLP: CODEBOOKbits/SCALE, e.g. balanced2/g32 or lut4/r32; or none"
    )
    attn: str = option("balanced2/g32", "quantiser of the attention projections")
    head: str = option("none", "quantiser of the LM head (and of an embedding tied to it)")
    init: str = option("mse", "where scales start: mse (least error, weighted by input activity) or absmax")
    layer_steps: int = option(0, "updates for each block before end-to-end training; 0 leaves the stage out")
    layer_rows: int = option(32, "training rows of the layer-wise stage")
    layer_learning_rate: float = option(5e-4, "peak learning rate of the layer-wise stage")
    layer_kd_weight: float = option(0.0, "weight of a global distillation term in the layer-wise loss")
    learning_rate: float = option(8e-4, "peak learning rate of weights and norms")
    scale_learning_rate: float | None = option(None, "peak learning rate of scales; default: --learning-rate")


def main(cfg: Config) -> None:
    spec = StudentSpec(mlp=cfg.mlp, attn=cfg.attn, head=cfg.head)
    plan, every = cfg.plan(), cfg.every()
    if cfg.layer_rows < 1:
        raise UserError(f"--layer-rows {cfg.layer_rows} must be at least 1")
    if cfg.init not in METHODS:
        raise UserError(f"--init {cfg.init!r} is not one of {', '.join(METHODS)}")
    scale_rate = cfg.learning_rate if cfg.scale_learning_rate is None else cfg.scale_learning_rate
    if scale_rate <= 0:
        raise UserError(f"--scale-learning-rate {scale_rate} must be above 0")
    layers = LayerPlan(
        steps=cfg.layer_steps, learning_rate=cfg.layer_learning_rate, scale_learning_rate=cfg.layer_learning_rate,
        clip_grad_norm=cfg.clip_grad_norm, kd_weight=cfg.layer_kd_weight,
    )  # fmt: skip
    train, heldout = open_cache(cfg)
    backend = open_backend(cfg.device, cfg.precision)
    describe(cfg, spec, train, heldout, backend)
    if cfg.dry_run:
        return

    run = open_run("train_qat", cfg, {"device": str(backend), "cache": train.fingerprint, "student": str(spec)})
    backend.seed(cfg.seed)
    session = Session(run, backend, every)
    student = quantize(load_model(cfg.model), spec)
    if session.resumed is None:
        start_scales(student, cfg, train, backend)
    backend.place(student)

    calibration = first_batches(train, cfg.layer_rows, cfg) if cfg.layer_steps else []
    train_layers(student, calibration, layers, session, backend)
    if cfg.layer_steps and not session.resumed:
        save_student(run.path / "layerwise.pt", student, cfg.model, spec, {"stage": "layers"})
    if cfg.gradient_checkpointing:
        backend.gradient_checkpointing(student)

    def evaluate(step: int) -> dict:
        figures = heldout_figures(student, heldout, backend, cfg.batch_size, cfg.eval_rows)
        best = run.path / "best.pt"
        if figures["heldout_kl"] < session.best("heldout_kl") or not best.exists():
            save_student(best, student, cfg.model, spec, {"step": step, **figures})
        return figures

    train_qat(student, train, plan, scale_rate, session, backend, evaluate)
    best = {"heldout_kl": session.best("heldout_kl")}
    run.finish("finished", best=best, bits_per_weight=bits_per_weight(student), **session.cost())
    plot_run(run.path)
    say(f"best held-out KL {best['heldout_kl']:.4f}; student in {run.path / 'best.pt'}")


def open_cache(cfg: Config) -> tuple[KDCacheDataset, KDCacheDataset]:
    if not cfg.cache_dir:
        raise UserError("--cache-dir is missing; build one with scripts/build_kd_cache.py")
    facts = {"tokenizer": tokenizer_fingerprint(load_tokenizer(cfg.model)), "vocab": load_config(cfg.model).vocab_size}
    train, heldout = (KDCacheDataset(cfg.cache_dir, split, **facts) for split in ("train", "heldout"))
    cfg.check_rows(train, heldout)
    return train, heldout


def describe(cfg: Config, spec: StudentSpec, train, heldout, backend: TorchBackend) -> None:
    """The resolved plan."""
    model = quantize(empty_model(cfg.model), spec)
    say(f"{cfg.model} → {spec}: {bits_per_weight(model):.2f} bits per weight, {megabytes(model):.1f} MB, on {backend}")
    say(f"cache {cfg.cache_dir}: {len(train)} training and {len(heldout)} held-out rows of {train.length} tokens")
    say(f"{cfg.layer_steps} updates for each of {len(decoder_layers(model))} blocks, then {cfg.max_steps} end to end")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    for line in cfg.describe(model.config, trained, frozen, train.length, backend.bf16):
        say(line)


def start_scales(student, cfg: Config, train, backend: TorchBackend) -> None:
    """Initialise the scales, each weight counted by how active its input is on some training rows."""
    moments = None
    if cfg.init == "mse":

        def forward(model, batch):
            with backend.autocast(), torch.no_grad(), unquantized(model):
                hidden_states(model, batch["tokens"])

        moments = input_moments(student, first_batches(train, cfg.layer_rows, cfg), forward)
    initialise(student, cfg.init, moments)


def first_batches(train, rows: int, cfg: Config) -> list[dict]:
    """Whole batches of `rows` training rows in all, chosen by the seed."""
    stream = batches(train, cfg.batch_size, 1, cfg.seed)
    return [next(stream) for _ in range(max(1, min(rows, len(train)) // cfg.batch_size))]


if __name__ == "__main__":
    run_script(main, Config, "train_qat", __doc__)
