"""Can a small model answer questions of law in five sections, rightly, and cite nothing that it made up? LoRA on chains
of thought.

    python scripts/train_cot_sft.py --config cpu
    python scripts/train_cot_sft.py --config v5e8 --tpu --resume auto
    python scripts/train_cot_sft.py --config cuda --dataset rzeraat/law
    python scripts/train_cot_sft.py --config cpu --dataset data/law.jsonl --quantize int4/g32 --output-dir runs/law4

The loss is computed on the answer only, weighted by section if asked; examples are packed into rows of --length tokens,
none of which sees another. Whole groups of near-duplicates are held out.
metrics.jsonl: loss, grad_norm, lr, tokens_per_s; at every evaluation heldout_nll, heldout_ppl and the same of each
section, and over --eval-answers greedy answers to held-out questions format, accuracy, citation_precision,
citation_recall, invented.
The run directory also gets data.json (what was left out, by id), authorities.json (what may be cited), baseline_ and
final_evaluation.json with every answer, adapter/ and model/, the whole model with the adapter merged.
docs/cot-sft.md says what to expect.
Untested on hardware: TPU, CUDA.
"""

from dataclasses import asdict, dataclass

import qat_lora  # noqa: F401 — it sets what torch reads when it is imported

# isort: split
from torch import nn

from qat_lora.backend import TorchBackend, launch, open_backend, planned_workers
from qat_lora.data.options import TokenOptions
from qat_lora.data.templates import begin_with_bos, template_facts
from qat_lora.errors import UserError, load_package
from qat_lora.experiments.cot_sft import (
    STAGES,
    LawData,
    LawExam,
    base_content,
    evaluation_file,
    law_data,
    law_rows,
    load_base,
    merged,
    section_weights,
    wandb_mirror,
    write_whole,
)
from qat_lora.memory import (
    Parts,
    answer_memory,
    check_fits,
    least_rollout_memory,
    least_training_memory,
    loading_memory,
    memory_line,
    program_memory,
    sizes_of,
    training_memory,
)
from qat_lora.models.architecture import model_type, packs, set_packs
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import EMBEDDED, adapter_notes, check_length, weights_fingerprint
from qat_lora.models.source import CHOICES, speech_files
from qat_lora.models.targets import coverage, left_out
from qat_lora.qat import Plan, train_plain
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import write_student
from qat_lora.recovery import add_adapter, save_adapter
from qat_lora.rl.ask import Asker
from qat_lora.rl.rollout import check_answers
from qat_lora.run.config import JobConfig, option, run_script
from qat_lora.run.files import sha256
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import attempt, begun, open_run, prepare, say
from qat_lora.run.session import Every, Session
from qat_lora.sft import packed_loss

NAME = "train_cot_sft"
METHODS = ("lora", "rslora", "full")


@dataclass(frozen=True, kw_only=True)
class Config(TokenOptions, JobConfig):
    model: str = option(EMBEDDED, f"instruct model: {CHOICES}", identity="base")
    dataset: str = option(
        "generated", "generated, a local .jsonl or .parquet file, or a hub dataset (rzeraat/law)", identity="data"
    )
    dataset_split: str = option("train", "split of a hub dataset")
    count: int = option(2000, "rows of the generated dataset")
    heldout_fraction: float = option(0.1, "share of the rows held out, in whole groups of near-duplicates")
    length: int = option(1000, "tokens in a row")
    method: str = option("lora", "lora, rslora (scaled by alpha/√rank) or full")
    lora_r: int = option(32, "rank")
    lora_alpha: float = option(64.0, "alpha")
    lora_dropout: float = option(0.05, "dropout before the adapter")
    quantize: str = option("none", "quantise the base first, like int4/g32, and train the adapter on that")
    section_weights: str | None = option(
        None, "weights of the loss, like answer=2,citation=2, of topic, difficulty, reasoning, answer, citation; else 1"
    )
    epochs: float = option(3.0, "passes over the rows")
    # How the rows of an update are split changes figures by rounding only; the facts record their number.
    batch_size: int = option(4, "rows in a micro-batch of each worker", identity=False)
    accumulation_steps: int = option(2, "micro-batches in an update", identity=False)
    num_chips: int | None = option(
        None, "TPU cores, GPUs or CPU processes of this host; 0: all; default: one", identity=False
    )
    learning_rate: float = option(2e-4, "peak learning rate")
    warmup_ratio: float = option(0.03, "share of the updates with linear warm-up")
    weight_decay: float = option(0.01, "decoupled weight decay")
    clip_grad_norm: float = option(1.0, "largest global gradient norm; 0 clips nothing")
    gradient_checkpointing: bool = option(
        True, "recompute blocks in the backward pass: less memory, more time", identity=False
    )
    eval_every: int = option(50, "updates between evaluations; 0: first and last", identity=False)
    eval_answers: int = option(32, "held-out questions answered at each evaluation; 0: none", identity=False)
    final_answers: int = option(300, "held-out questions answered before and after training; 0: none", identity=False)
    answer_rows: int = option(64, "answers generated at a time", identity=False)
    max_prompt_length: int = option(256, "tokens that every question is padded to", identity=False)
    max_new_tokens: int = option(256, "longest answer in tokens", identity=False)
    save_every: int = option(50, "updates between checkpoints; 0: last", identity=False)
    keep: int = option(2, "checkpoints that are kept", identity=False)
    log_every: int = option(5, "updates between lines of metrics.jsonl", identity=False)
    wandb: str | None = option(None, "also log to this project of Weights & Biases", identity=False)


def main(cfg: Config) -> None:
    check(cfg)
    if cfg.dry_run:
        return work(open_backend(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, in each of its workers."""
    cfg = prepare(NAME, cfg, backend.group)
    tokenizer = cfg.tokenizer(cfg.model, begun(NAME, cfg, backend.group))
    if cfg.bos == "on":  # else as the template has it, which is what transformers does with a conversation
        begin_with_bos(tokenizer)
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    with backend.group.main_first():
        rows = law_rows(cfg.dataset, cfg.dataset_split, cfg.count, cfg.seed)
    weights = section_weights(cfg.section_weights)
    with_values = backend.is_main and not cfg.dry_run
    check_memory(cfg, adapted(cfg, load_base(cfg.model, cfg.quantize, False)), backend, workers)
    base = load_base(cfg.model, cfg.quantize, with_values)
    together = packs(base) if cfg.dry_run else backend.group.on_main(lambda: packs(base))
    set_packs(base, together)  # the other workers have no weights to find out with
    if cfg.eval_answers or cfg.final_answers:
        try:
            check_answers(base, backend.kind, with_values)
        except UserError as error:
            raise UserError(f"{error}, or --eval-answers 0 --final-answers 0") from error
    data = law_data(rows, tokenizer, cfg.length, weights, cfg.heldout_fraction, cfg.seed, together, cfg.thinks)
    plan = plan_of(cfg, data, workers)
    student = base_content(base, cfg.model, cfg.quantize) if with_values else None
    fingerprint = None if cfg.dry_run else backend.group.on_main(lambda: weights_fingerprint(base))
    model = adapted(cfg, base)
    ends = backend.group.on_main(lambda: tuple(end_tokens(model, tokenizer)))  # the others have no generation config
    asker = Asker(tokenizer, backend, ends, cfg.answer_rows, cfg.max_prompt_length, cfg.max_new_tokens, cfg.thinks)
    exam = LawExam(asker, data)  # refuses prompts that do not fit
    if backend.is_main:
        describe(cfg, model, backend, data, plan, workers)
    if cfg.dry_run:
        return

    facts = {
        **backend.facts, "base": fingerprint, "data": data.train.fingerprint,
        "heldout_data": data.heldout.fingerprint, "rows_per_update": plan.batch_size * plan.accumulation * workers,
        "model files": backend.group.on_main(lambda: speech_files(cfg.model)),
        **template_facts(tokenizer, cfg.chat_template),
    }  # fmt: skip
    run = open_run(NAME, cfg, facts, backend.group)
    if cfg.wandb and backend.is_main:
        run.mirror = attempt(f"--wandb {cfg.wandb}", wandb_mirror, cfg.wandb, run.path, asdict(cfg))
    backend.seed(cfg.seed + backend.rank)  # each worker's dropout is its own
    every, files = Every(cfg.log_every, cfg.eval_every, cfg.save_every), [evaluation_file(name) for name in STAGES]
    session = Session(run, backend, every, keep=cfg.keep, files=files)
    if backend.is_main:
        data.write(run.path)
        if student:
            write_student(run.path / "base.pt", student)
    backend.place(model)
    if cfg.gradient_checkpointing:
        backend.gradient_checkpointing(model)

    if cfg.final_answers:
        exam.write(model, cfg.final_answers, run, "baseline")
    train_plain(
        model, data.train, packed_loss, plan, session,
        lambda step: exam.glance(model, cfg.batch_size, cfg.eval_answers), "sft",
    )  # fmt: skip
    figures = exam.write(model, cfg.final_answers, run, "final") if cfg.final_answers else {}
    cost = session.cost()
    if backend.is_main:
        checkpoint = run.path / "base.pt" if student else None
        adapter = None if cfg.method == "full" else run.path / "adapter"
        if adapter:
            save_adapter(model, adapter, sha256(checkpoint) if checkpoint else None)
        whole, gap = merged(model, cfg.model, checkpoint, adapter, data.train[0]["tokens"], backend)
        write_whole(whole, tokenizer, run.path / "model")
        attempt("plotting", plot_run, run.path)
        run.finish("finished", **figures, merged_logit_gap=gap, **cost)
        same = "" if gap is None else f"adapter and merged model differ by {gap:.1e} in a logit; "
        say(f"{same}model in {run.path / 'model'}")


# -- what is asked for -----------------------------------------------------------------------------------------------
def check(cfg: Config) -> None:
    if cfg.method not in METHODS:
        raise UserError(f"--method {cfg.method!r} is not one of {', '.join(METHODS)}")
    if QuantSpec.parse(cfg.quantize) and cfg.method == "full":
        raise UserError(f"--quantize {cfg.quantize} freezes the base; use --method lora or rslora with it")
    if not 0 <= cfg.warmup_ratio < 1 or not 0 < cfg.epochs <= 10_000:
        raise UserError(f"--warmup-ratio {cfg.warmup_ratio} must be in [0, 1) and --epochs {cfg.epochs} above 0")
    if cfg.batch_size < 1:
        raise UserError(f"--batch-size {cfg.batch_size} must be at least 1")
    if min(cfg.eval_answers, cfg.final_answers) < 0 or cfg.answer_rows < 1 or cfg.max_new_tokens < 1 or cfg.keep < 1:
        raise UserError(
            f"--eval-answers {cfg.eval_answers} and --final-answers {cfg.final_answers} must not be negative, "
            f"--answer-rows {cfg.answer_rows}, --max-new-tokens {cfg.max_new_tokens} and --keep {cfg.keep} at least 1"
        )
    if cfg.wandb:
        load_package("wandb", f"--wandb {cfg.wandb}", ", or leave the option out")
    section_weights(cfg.section_weights), cfg.thinks
    check_length(cfg.model, cfg.length, mixed=True)
    answer = cfg.max_prompt_length + cfg.max_new_tokens
    check_length(cfg.model, answer, "--max-prompt-length and --max-new-tokens", mixed=True)
    Every(cfg.log_every, cfg.eval_every, cfg.save_every)


def plan_of(cfg: Config, data: LawData, workers: int) -> Plan:
    rows = cfg.batch_size * cfg.accumulation_steps * workers
    if rows > cfg.epochs * len(data.train):
        raise UserError(
            f"an update of {rows} rows (--batch-size {cfg.batch_size}, --accumulation-steps {cfg.accumulation_steps}, "
            f"{workers} workers) is more than --epochs {cfg.epochs:g} of {len(data.train)} packed rows; lower one"
        )
    if cfg.batch_size * workers > len(data.train):
        raise UserError(
            f"{len(data.train)} packed rows do not fill a batch of --batch-size {cfg.batch_size} for each of {workers} "
            "workers; lower one of them, or add rows"
        )
    steps = round(cfg.epochs * len(data.train) / max(1, rows))
    return Plan(
        steps=steps, batch_size=cfg.batch_size, accumulation=cfg.accumulation_steps, learning_rate=cfg.learning_rate,
        warmup_steps=round(cfg.warmup_ratio * steps), clip_grad_norm=cfg.clip_grad_norm, seed=cfg.seed,
        weight_decay=cfg.weight_decay, options={"steps": f"--epochs {cfg.epochs:g}"},
    )  # fmt: skip


def adapted(cfg: Config, base: nn.Module) -> nn.Module:
    """The base with a new adapter on every linear layer of its blocks, or all of it to be trained."""
    if cfg.method == "full":
        return base.requires_grad_(True)
    base.requires_grad_(False)
    rslora = cfg.method == "rslora"
    return add_adapter(base, cfg.lora_r, cfg.lora_alpha, ("all",), cfg.seed, cfg.lora_dropout, rslora)


def describe(cfg: Config, model: nn.Module, backend: TorchBackend, data: LawData, plan: Plan, workers: int) -> None:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    rows = plan.batch_size * plan.accumulation * workers
    say(f"{cfg.model} on {backend}: {trained:,} trained of {whole:,} values ({cfg.method})")
    if cfg.method != "full":
        for line in (f"adapter: {coverage(model)}", *left_out(model), *adapter_notes(cfg.model)):
            say(line)
    for line in data.lines():
        say(line)
    if not packs(model):
        say(f"one example to a row: a model of type {model_type(model)!r} does not keep several apart")
    say(f"{plan.steps} updates of {plan.batch_size} × {plan.accumulation} × {workers} = {rows} rows "
        f"({rows * cfg.length:,} tokens), learning rate {plan.learning_rate:g}")  # fmt: skip
    say(memory_line(memory(cfg, model, backend), backend))


def memory(cfg: Config, model: nn.Module, backend: TorchBackend) -> dict[str, Parts]:
    """What each phase takes."""
    row = cfg.max_prompt_length + cfg.max_new_tokens
    rows = cfg.answer_rows if cfg.eval_answers or cfg.final_answers else 0
    whole = sum(p.numel() for p in model.parameters())
    return {
        "loading": loading_memory(model),
        "training": training_memory(model, cfg.batch_size, cfg.length, backend.bf16, cfg.gradient_checkpointing),
        "answering": answer_memory(model, rows, row, backend.bf16),
        "reading back": program_memory(model) | {"weights": 4 * whole, "read back": 4 * whole, "the file": 4 * whole},
    }


def check_memory(cfg: Config, model: nn.Module, backend: TorchBackend, workers: int) -> None:
    """Raise UserError for a model, here without storage, that cannot be trained on this machine. Dry runs pass: they
    may plan for another machine."""
    if cfg.dry_run:
        return
    need = least_training_memory(model, cfg.batch_size, cfg.length, backend.bf16)
    what = f"training {sizes_of(model)} on --batch-size {cfg.batch_size} rows of {cfg.length} tokens"
    check_fits(backend, {"--batch-size, --length, or take a smaller model": need}, what, workers)
    need = least_rollout_memory(model, 1, cfg.answer_rows, cfg.max_new_tokens)
    check_fits(backend, {"--answer-rows": need}, f"generating --answer-rows {cfg.answer_rows} answers", workers)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
