# PYTHON_ARGCOMPLETE_OK
"""Can a small model answer legal questions correctly and cite only real authorities? Fine-tuning on reasoned answers.

    python scripts/train_cot_sft.py --config cpu
    python scripts/train_cot_sft.py --config v5e8 --resume auto
    python scripts/train_cot_sft.py --config cuda --dataset rzeraat/law
    python scripts/train_cot_sft.py --config cpu --dataset data/law.jsonl --quantize int4/g32 --output-dir runs/law4

An answer has five sections: Topic, Difficulty, Reasoning, Answer, Case Citation. A LoRA adapter (or the full model)
learns them; the loss is computed on the answer only, weighted by --section-weights. Examples are packed into rows of
--length tokens but do not attend to each other. Near-duplicates are held out together.
metrics.jsonl: loss, anchor_kl, grad_norm, lr, tokens, tokens_per_s; at every evaluation heldout_nll and heldout_ppl,
overall and for each section, and format, accuracy, citation_precision, citation_recall and invented over --eval-answers
greedy answers to held-out questions.
The run directory also gets data.json (ids of the rows held out and left out), authorities.json (what may be cited),
baseline_evaluation.json and final_evaluation.json with every answer, adapter/, and model/, the whole model with the
adapter merged; with --quantize base.pt, the frozen base, or student.pt if --method full has trained it.
docs/cot-sft.md is the runbook. Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import TokenOptions
from qat_lora.experiments.low_bit import LowBitOptions
from qat_lora.kd.options import AnchorOptions
from qat_lora.models.packaged import CHOICES, EMBEDDED
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import BatchOptions

NAME = "train_cot_sft"


@dataclass(frozen=True, kw_only=True)
class Config(TokenOptions, LowBitOptions, AnchorOptions, BatchOptions, JobConfig):
    model: str = opt.model(EMBEDDED, f"instruct model: {CHOICES}", identity="base")
    method: Literal["lora", "rslora", "full"] = opt.model(
        "lora", "which parameters to train: a LoRA adapter, one scaled by alpha/√rank, or the full model"
    )
    lora_r: int = opt.model(32, "rank of the LoRA adapter", at_least=1)
    lora_alpha: float = opt.model(64.0, "LoRA alpha", above=0, at_most=opt.MOST_WEIGHT)
    lora_dropout: float = opt.model(
        0.05, "dropout rate of the adapter's input", at_least=0, below=1, fix="use e.g. 0.05"
    )
    dataset: str = opt.data(
        "generated",
        "data: generated, a local .jsonl or .parquet file, or a hub dataset, e.g. rzeraat/law",
        identity="data",
    )
    dataset_split: str = opt.data("train", "split of a hub dataset")
    count: int = opt.data(2000, "rows to generate")
    heldout_fraction: float = opt.data(
        0.1, "share of the rows held out for evaluation, in whole groups of near-duplicates"
    )
    length: int = opt.data(1000, "tokens per row", at_least=2)
    section_weights: str | None = opt.data(
        None,
        "loss weights of sections (topic, difficulty, reasoning, answer, citation), e.g. answer=2,citation=2 [1 each]",
    )
    epochs: float = opt.training(3.0, "passes over the rows", above=0, at_most=10_000)
    max_steps: int | None = opt.training(
        None, "number of updates [--epochs passes]", at_least=1, at_most=opt.MOST_UPDATES
    )
    accumulation_steps: int = opt.with_default(BatchOptions, "accumulation_steps", 2)
    learning_rate: float = opt.with_default(BatchOptions, "learning_rate", 2e-4)
    warmup_ratio: float = opt.training(0.03, "share of the updates spent on linear warm-up", at_least=0, below=1)
    weight_decay: float = opt.training(0.01, "decoupled weight decay", **opt.DECAY)
    gradient_checkpointing: bool = opt.with_default(BatchOptions, "gradient_checkpointing", True)
    eval_every: int = opt.with_default(BatchOptions, "eval_every", 50)
    eval_answers: int = opt.run(32, "held-out questions to answer at each evaluation", at_least=0)
    final_answers: int = opt.run(300, "held-out questions to answer before and after training", at_least=0)
    answer_rows: int = opt.run(64, "answers to generate at a time", at_least=1)
    max_prompt_length: int = opt.run(256, "length to which every question is padded, in tokens", at_least=1)
    max_new_tokens: int = opt.run(256, "longest answer, in tokens", at_least=1)
    save_every: int = opt.with_default(BatchOptions, "save_every", 50)
    keep: int = opt.run(2, "checkpoints to keep", at_least=1)
    log_every: int = opt.with_default(BatchOptions, "log_every", 5)
    wandb: str | None = opt.run(None, "project of Weights & Biases to log to; implies --report-to wandb")

    def __post_init__(self):
        if self.wandb:
            object.__setattr__(self, "report_to", "wandb")
        super().__post_init__()


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.opening import launch
from qat_lora.backend.sharding import takes_part
from qat_lora.data.batches import SameRows
from qat_lora.data.supervised import PackedExamples
from qat_lora.data.templates import begin_with_bos, template_facts
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import messages
from qat_lora.experiments.legal.data import LegalData, legal_data, legal_rows, section_weights
from qat_lora.experiments.legal.evaluation import STAGES, LegalEvaluation, evaluation_file, quality
from qat_lora.experiments.legal.sections import NUMBERS
from qat_lora.experiments.legal.writing import base_of, write_trained
from qat_lora.export.targets import check_target
from qat_lora.lora.add import add_adapter
from qat_lora.lora.targets import coverage, left_out
from qat_lora.models.architecture import model_type, packs, set_packs
from qat_lora.models.compiling import placed, set_up_blocks
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import adapter_notes, check_length, weights_fingerprint
from qat_lora.models.source import PlannedTokenizer, planned_name, speech_files
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.student import StudentSpec
from qat_lora.rl.rollout import check_answers
from qat_lora.rl.sampler import GREEDY, Sampler
from qat_lora.run.console import command, say
from qat_lora.run.metrics import Share, Total
from qat_lora.run.report import finish
from qat_lora.run.resuming import begun, prepare
from qat_lora.run.rundir import open_run
from qat_lora.run.session import Session
from qat_lora.train.language_memory import (
    answer_memory,
    least_rollout_memory,
    loading_memory,
    reading_memory,
    sizes_of,
    training_memory,
)
from qat_lora.train.loop import Plan, plain_stage, tokens_of
from qat_lora.train.memory import Parts, check_fits, memory_line
from qat_lora.train.options import checked_updates
from qat_lora.train.supervised import heldout_sections, packed_loss

QUESTION = "A baker broke a simple contract with a supplier on 3 May 2021. Find the last day for issuing the claim."


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    check(cfg)
    if cfg.dry_run:
        return work(open_planned(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    cfg, group = prepare(NAME, cfg, backend.group), backend.group
    spec = group.on_main(cfg.student_spec)
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    tokenizer = cfg.tokenizer(cfg.model, begun(NAME, cfg, group))
    if cfg.bos == "on":  # else BOS only if the template has it, as in transformers' chat
        begin_with_bos(tokenizer)
    with group.main_first():
        anchor = cfg.anchor(cfg.model, tokenizer, cfg.batch_size * workers)
        rows = legal_rows(cfg.dataset, cfg.dataset_split, cfg.count, cfg.seed)
    loads = backend.is_main and not cfg.dry_run  # the other workers get worker 0's weights, and a dry run needs none
    base, shared = open_base(cfg, spec, backend, workers, loads)
    weights = section_weights(cfg.section_weights)
    data = legal_data(rows, tokenizer, cfg.length, weights, cfg.heldout_fraction, cfg.seed, packs(base), cfg.thinks)
    plan = plan_of(cfg, data.train, workers)
    facts = {} if cfg.dry_run else facts_of(cfg, spec, base, data, tokenizer, backend)
    ends = group.on_main(lambda: tuple(end_tokens(base, tokenizer)))  # other workers have no generation config
    sizes = cfg.answer_rows, cfg.max_prompt_length, cfg.max_new_tokens
    evaluation = LegalEvaluation(Sampler(tokenizer, backend, ends, *sizes, cfg.thinks), data)  # checks the questions
    describe(cfg, adapted(cfg, cfg.empty_policy(spec)), backend, data, plan, workers, shared)
    if cfg.dry_run:
        return

    facts |= {"anchor": anchor.rows.fingerprint} if anchor else {}
    run = open_run(NAME, cfg, facts, group)
    backend.seed(cfg.seed + backend.rank)  # each worker draws its own dropout
    files = ["base.pt", *map(evaluation_file, STAGES)]
    session = Session(run, backend, cfg.every(), keep=cfg.keep, files=files, anchor=anchor)
    if backend.is_main:
        data.write(run.path)
        base = base_of(cfg, spec, base, data.train, run.path / "base.pt", session.resumed)
    model = placed(adapted(cfg, base), backend, shared)
    set_up_blocks(model, backend, cfg.gradient_checkpointing, cfg.compile)

    before = evaluation.write(model, cfg.final_answers, run, "baseline") if cfg.final_answers else {}
    fine_tune(model, data.train, plan, session, lambda _: evaluation.glance(model, cfg.batch_size, cfg.eval_answers))
    figures = evaluation.write(model, cfg.final_answers, run, "final") if cfg.final_answers else {}
    cost = session.cost()
    if takes_part(model, backend):
        made, gap = write_trained(model, cfg.model, spec, run.path, tokenizer, data.train[0]["tokens"], backend)
    if backend.is_main:
        finish(
            run, figures | cost | {"merged_logit_gap": gap}, made, quality(run, before | figures),
            command("run_legal_assistant", run=run.path, question=QUESTION),
        )  # fmt: skip


def fine_tune(model: nn.Module, train: PackedExamples, plan: Plan, session: Session, evaluate: Callable) -> None:
    """SFT on answer tokens only. Examples that share a row do not attend to each other."""
    backend = session.backend
    model.train()
    for update in plain_stage("sft", model, train, plan, session, evaluate):  # resumes, evaluates, saves in between
        for batch in update:  # its micro-batches, on the device
            with backend.autocast():
                loss = packed_loss(model, batch)
            backend.backward(loss)
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
        if session.anchor:
            session.anchor.add_to(update, model)
        norm = update.step()  # reduces over workers, clips, steps
        update.record(grad_norm=norm)


# -- the steps -------------------------------------------------------------------------------------------------------
def check(cfg: Config) -> None:
    section_weights(cfg.section_weights)
    check_length(cfg.model, cfg.length, mixed=True)
    answer = cfg.max_prompt_length + cfg.max_new_tokens
    check_length(cfg.model, answer, "--max-prompt-length and --max-new-tokens", mixed=True)


def plan_of(cfg: Config, train: Dataset, workers: int) -> Plan:
    rows = cfg.update_facts(workers)["rows_per_update"]
    if cfg.max_steps is None and rows > cfg.epochs * len(train):
        raise UserError(
            f"an update of {rows} rows (--batch-size {cfg.batch_size}, --accumulation-steps {cfg.accumulation_steps}, "
            f"{workers} workers) is more than --epochs {cfg.epochs:g} of {len(train)} packed rows; lower one"
        )
    if cfg.batch_size * workers > len(train):
        raise UserError(
            f"{len(train)} packed rows do not fill a batch of --batch-size {cfg.batch_size} for each of {workers} "
            "workers; lower one of them, or add rows"
        )
    steps = cfg.max_steps or checked_updates(round(cfg.epochs * len(train) / rows), "--epochs", cfg.epochs)
    return Plan(
        steps=steps, batch_size=cfg.batch_size, accumulation=cfg.accumulation_steps, learning_rate=cfg.learning_rate,
        warmup_steps=round(cfg.warmup_ratio * steps), clip_grad_norm=cfg.clip_grad_norm, seed=cfg.seed,
        weight_decay=cfg.weight_decay,
    )  # fmt: skip


def open_base(
    cfg: Config, spec: StudentSpec | None, backend: TorchBackend, workers: int, loads: bool
) -> tuple[nn.Module, bool]:  # fmt: skip
    """The model, quantised by `spec`, without values if not `loads`; and whether the workers share it out. Checks that
    it fits in memory (a dry run may plan for another machine), and that it can generate answers."""
    model = adapted(cfg, cfg.empty_policy(spec))
    shared, need = cfg.shares(model, cfg.length, backend, workers)
    if not cfg.dry_run:
        what = f"training {sizes_of(model)} on --batch-size {cfg.batch_size} rows of {cfg.length} tokens"
        check_fits(backend, {"--batch-size, --length, or take a smaller model": need}, what, workers)
        need = least_rollout_memory(model, 1, cfg.answer_rows, cfg.max_new_tokens)
        check_fits(backend, {"--answer-rows": need}, f"generating --answer-rows {cfg.answer_rows} answers", workers)
    base = (cfg.load_policy if loads else cfg.empty_policy)(spec)
    together = packs(base) if cfg.dry_run else backend.group.on_main(lambda: packs(base))
    set_packs(base, together)  # the other workers have no weights to check it with
    if cfg.eval_answers or cfg.final_answers:
        try:
            check_answers(base, backend.static_shapes, loads)
        except UserError as error:
            raise UserError(f"{error}, or --eval-answers 0 --final-answers 0") from error
    return base, shared


def facts_of(
    cfg: Config, spec: StudentSpec | None, base: nn.Module, data: LegalData, tokenizer, backend: TorchBackend
) -> dict:
    """The inputs of the run, for its manifest."""
    return {
        **backend.facts,
        "base": backend.group.on_main(lambda: weights_fingerprint(base)),
        "data": data.train.fingerprint,
        "heldout_data": data.heldout.fingerprint,
        **cfg.update_facts(backend.world_size),
        "model files": backend.group.on_main(lambda: speech_files(cfg.model)),
        **template_facts(tokenizer, cfg.chat_template),
        **backend.group.on_main(lambda: cfg.start_facts(spec)),
    }


def adapted(cfg: Config, base: nn.Module) -> nn.Module:
    """The base, frozen, with a new adapter on every linear layer of its blocks, or with its own weights trainable."""
    if cfg.method == "full":
        return base if quantized_layers(base) else base.requires_grad_(True)
    freeze(base)
    sizes = cfg.lora_r, cfg.lora_alpha
    return add_adapter(base.requires_grad_(False), *sizes, ("all",), cfg.seed, cfg.lora_dropout, cfg.method == "rslora")


def describe(
    cfg: Config, model: nn.Module, backend: TorchBackend, data: LegalData, plan: Plan, workers: int, shared: bool
) -> None:
    """Print the plan of the run."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    say(f"{cfg.model} on {backend}: {trained:,} of {whole:,} parameters are trained ({cfg.method})")
    if cfg.target:
        say(check_target(cfg.target, cfg.model, model))
    if cfg.method != "full":
        for line in (f"adapter: {coverage(model)}", *left_out(model), *adapter_notes(cfg.model)):
            say(line)
    for line in data.lines():
        say(line)
    if not packs(model):
        say(f"one example per row: a model of type {model_type(model)!r} cannot keep several apart")
    rows = cfg.update_facts(workers)["rows_per_update"]
    say(
        f"{plan.steps} updates of {plan.batch_size} × {plan.accumulation} × {workers} = {rows} rows "
        f"({rows * cfg.length:,} tokens), learning rate {plan.learning_rate:g}"
    )
    say(memory_line(memory(cfg, model, backend, workers if shared else 1), backend))


def memory(cfg: Config, model: nn.Module, backend: TorchBackend, workers: int = 1) -> dict[str, Parts]:
    """The memory that each phase takes. workers: how many share the model out; to answer, each has all of it."""
    row = cfg.max_prompt_length + cfg.max_new_tokens
    rows = cfg.answer_rows if cfg.eval_answers or cfg.final_answers else 0
    sizes = cfg.batch_size, max(cfg.length, cfg.anchor_length()), backend.bf16, cfg.gradient_checkpointing
    return {
        "loading": loading_memory(model),
        "training": training_memory(model, *sizes, compiled=backend.static_shapes, workers=workers),
        "answering": answer_memory(model, rows, row, backend.bf16),
        "reading back": reading_memory(model),
    }


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    model has no weights, and all tokens are zeros. In real data fewer positions are targets; here all are."""
    update = cfg.update_facts(backend.world_size)["rows_per_update"]
    tokens, places = torch.zeros(cfg.length, dtype=torch.long), torch.arange(1, cfg.length)
    row = {
        "tokens": tokens, "segments": torch.ones_like(tokens), "positions": tokens, "places": places,
        "sections": torch.ones_like(places), "weights": torch.ones(len(places)),
    }  # fmt: skip
    train, heldout = SameRows(1000 * update, **row), SameRows(cfg.batch_size, **row)
    model = adapted(cfg, cfg.empty_policy(cfg.student_spec(), planned_name(cfg.model)))
    tokenizer = PlannedTokenizer()
    ends, sizes = tuple(end_tokens(model, tokenizer)), (cfg.answer_rows, cfg.max_prompt_length, cfg.max_new_tokens)
    sampler = Sampler(tokenizer, backend, ends, *sizes)
    backend.place(model)
    set_up_blocks(model, backend, cfg.gradient_checkpointing, cfg.compile)

    if cfg.eval_answers or cfg.final_answers:
        with backend.phase("answers"):  # to one question: a batch is filled up, so all batches have one shape
            sampler.generate(model, [messages(QUESTION)], 1, GREEDY)
    session = backend.rehearsal(update * cfg.length, cfg.planned_anchor(update))
    plan = plan_of(cfg, train, backend.world_size)
    fine_tune(model, train, plan, session, lambda _: heldout_sections(model, heldout, backend, cfg.batch_size, NUMBERS))
    return memory(cfg, model, backend)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
