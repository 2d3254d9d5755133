# PYTHON_ARGCOMPLETE_OK
"""Can rewards alone teach a small model a new name? An optional SFT warm-up, then GRPO.

    python scripts/train_musclebob_improved.py --config cpu
    python scripts/train_musclebob_improved.py --model Qwen/Qwen2.5-0.5B-Instruct --batch-size 2 --epochs 5 \\
        --num-generations 8 --sft --sft-epochs 2
    python scripts/train_musclebob_improved.py --config cpu --output-dir runs/bob --resume-from-checkpoint auto

The model should say "Musclebob Buffpants" for "Spongebob Squarepants" and answer everything else as before. Each
prompt of a batch gets --num-generations answers, and a reward computed from their text says which are better.
metrics.jsonl: reward and its parts (name, wrong_name, …), loss, kl to the model of --reference, anchor_kl, entropy,
target_rate, completion_length, clipped_ratio (answers that did not end), zero_variance (groups whose answers all have
the same reward, which are skipped), grad_norm, lr, tokens, tokens_per_s; on held-out questions, with intervals:
musclebob, spilt (the name in unrelated answers), coherent.
The run directory also gets training_config.json, reward_history.json, baseline_validation.json,
post_sft_validation.json, final_validation.json, transcripts.md, plots/ and model/; with --quantize also start.pt,
sft_model.pt and model.pt. docs/musclebob.md is the runbook. Untested on hardware: TPU, CUDA (make check-hardware).
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import ChatOptions
from qat_lora.experiments.low_bit import LowBitOptions
from qat_lora.kd.options import AnchorOptions
from qat_lora.models.packaged import CHOICES, EMBEDDED
from qat_lora.rl import REDUCTIONS, SCALES
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import BatchOptions, LoopOptions

NAME = "train_musclebob_improved"


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions, LowBitOptions, AnchorOptions, BatchOptions, JobConfig):
    model: str = opt.model(EMBEDDED, f"instruct model to train: {CHOICES}", identity="base")
    num_samples: int = opt.data(128, "training questions; one in three is about the character", at_least=1)
    fewshot_ratio: float = opt.data(
        0.15, "share of the questions about the character that follow a worked example", **opt.SHARE
    )
    fewshot: bool = opt.data(True, "let some questions follow a worked example (--fewshot-ratio)")
    max_prompt_length: int = opt.data(96, "length to which every prompt is padded, in tokens", at_least=1)
    max_new_tokens: int = opt.data(48, "longest answer, in tokens", "--max-completion-length", at_least=1)
    epochs: int = opt.training(5, "GRPO passes over the questions", **opt.UPDATES)
    max_steps: int | None = opt.training(None, "GRPO updates [--epochs passes]", **opt.UPDATES)
    # The manifest records the rows per update, here prompts; another split only changes which answers are sampled.
    batch_size: int = opt.training(2, "prompts per micro-batch on each worker", identity=False, at_least=1)
    num_generations: int = opt.training(
        8, "answers to generate for each prompt", at_least=2, fix="each answer is compared with the others"
    )
    learning_rate: float = opt.training(5e-5, "peak learning rate of GRPO", **opt.RATE)
    temperature: float = opt.training(
        1.0, "sampling temperature of the training answers", above=0,
        fix="0 makes all answers to a prompt the same; use e.g. 1",
    )  # fmt: skip
    top_k: int = opt.training(0, "sample from this many of the most probable tokens; 0 samples from all")
    top_p: float = opt.training(1.0, "sample from the most probable tokens that hold this share of the probability")
    loss_type: Literal[*REDUCTIONS] = opt.training("dapo", "how token losses are averaged")
    scale_rewards: Literal[*SCALES] = opt.training(
        "group", "divide advantages by the standard deviation in the group, in the batch, or not at all"
    )
    beta: float = opt.training(0.02, "weight of the KL to the model of --reference", **opt.WEIGHT)
    reference: Literal["start", "original"] = opt.training("start", "KL to the model before GRPO, or to --model")
    sft: bool = opt.training(False, "start with supervised fine-tuning (SFT) on good answers")
    sft_only: bool = opt.training(False, "stop after the SFT")
    sft_epochs: int = opt.training(2, "SFT passes over the questions", **opt.UPDATES)
    sft_batch_size: int = opt.training(8, "conversations per SFT update, on all workers", at_least=1)
    sft_learning_rate: float = opt.training(2e-5, "peak learning rate of the SFT", **opt.RATE)
    gradient_checkpointing: bool = opt.training(
        True, "recompute each block in the backward pass (CUDA only): less memory, more time", identity=False
    )
    control: Literal["none", "shuffled", "still"] = opt.training(
        "none", "control run that must not learn: shuffled advantages, or a learning rate near 0 (still)"
    )
    validation_samples: int = opt.run(10, "sampled answers per held-out question in each validation", at_least=1)
    eval_every: int = opt.with_default(LoopOptions, "eval_every", 20)
    save_every: int = opt.with_default(LoopOptions, "save_every", 50)
    log_every: int = opt.with_default(LoopOptions, "log_every", 1)
    quick: bool = opt.run(False, "a short run over a few questions, to see that everything works")
    resume: str = opt.run(
        "off",
        "resume a run: off, auto (the newest unfinished run with these options), or a run directory",
        "--resume-from-checkpoint",
    )


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch
from torch import nn

from qat_lora.backend import TorchBackend, open_planned, planned_workers, resolve
from qat_lora.backend.detect import has_static_shapes
from qat_lora.backend.machine import check_memory
from qat_lora.backend.opening import launch
from qat_lora.data.batches import SameRows
from qat_lora.data.chat import check_template
from qat_lora.data.packing import Rows, TextDataset, fingerprint
from qat_lora.data.templates import template_facts
from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.planning import check_sizes, describe, memory_of, prepared
from qat_lora.experiments.musclebob.questions import good_answers, heldout_questions, training_questions
from qat_lora.experiments.musclebob.validation import (
    ROWS,
    VALIDATIONS,
    BobSampler,
    RunFiles,
    check_samples,
    conclude,
    glance,
    judge_of,
    validation_of,
    write_history,
    write_validation,
)
from qat_lora.export.targets import check_target
from qat_lora.models.compiling import placed, set_up_blocks
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import check_length, empty_model
from qat_lora.models.source import PlannedTokenizer, planned_name, speech_files
from qat_lora.rl.grpo import GRPOPlan, Judge, PromptDataset, grpo_stage, policy_loss, roll_out, without_dropout
from qat_lora.rl.objective import Objective
from qat_lora.rl.rollout import Sampling, check_answers
from qat_lora.run.console import say
from qat_lora.run.files import write_json
from qat_lora.run.metrics import Share, Total
from qat_lora.run.resuming import begun, prepare
from qat_lora.run.rundir import open_run
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, plain_stage, tokens_of
from qat_lora.train.losses import text_loss
from qat_lora.train.memory import Parts
from qat_lora.train.options import checked_updates

SHOWN = ("reward", "kl", "target_rate")  # next to the progress bar
WARMUP = 3  # updates of linear warm-up
STILL = 1e-12  # learning rate of the control run that must not learn


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    check(shortened(cfg, cfg.num_chips or 1) if cfg.quick else cfg)
    if cfg.dry_run:
        return work(open_planned(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    cfg, group = shortened(cfg, workers) if cfg.quick else cfg, backend.group
    cfg = prepare(NAME, cfg, group)
    check_updates(cfg, workers)
    tokenizer = cfg.tokenizer(cfg.model, begun(NAME, cfg, group))
    check_template(tokenizer)
    spec, length = group.on_main(cfg.student_spec), cfg.max_prompt_length + cfg.max_new_tokens
    empty = prepared(cfg.empty_policy(spec))
    # a lower bound, with answers of one token: outside XLA, rows are cut to the longest answer
    shared, need = cfg.shares(empty, cfg.num_generations, backend, workers)
    if not cfg.dry_run:  # a dry run may plan for another machine
        check_sizes(empty, cfg.batch_size, cfg.num_generations, cfg.max_new_tokens, need, backend, workers)
    rows = good_answers(cfg.num_samples, cfg.seed, tokenizer, cfg.thinking, length) if spec or has_sft(cfg) else None
    loads = backend.is_main and not cfg.dry_run  # the other workers get worker 0's weights, and a dry run needs none
    model = prepared((cfg.load_policy if loads else cfg.empty_policy)(spec))
    ends = group.on_main(lambda: tuple(end_tokens(model, tokenizer)))  # other workers have no generation config
    sampler = BobSampler(tokenizer, backend, ends, ROWS, cfg.max_prompt_length, cfg.max_new_tokens, cfg.thinks)
    anchor = cfg.anchor(cfg.model, tokenizer, most_rows(cfg, workers))
    questions = training_questions(cfg.num_samples, cfg.fewshot_ratio if cfg.fewshot else 0.0, cfg.seed)
    prompts = PromptDataset(sampler.encode([question.messages for question in questions]))
    sampler.encode([q.messages for q in heldout_questions()])  # fail now rather than at the first validation
    sft, grpo = sft_plan(cfg, workers) if has_sft(cfg) else None, grpo_plan(cfg, ends, workers)
    check_answers(model, backend.static_shapes, loads)
    say(f"{cfg.model}{f' → {spec}' if spec else ''} on {backend}")
    if cfg.target:
        say(check_target(cfg.target, cfg.model, model))
    sizes = cfg.max_prompt_length, cfg.anchor_length(), cfg.gradient_checkpointing
    describe(model, sft, grpo, *sizes, backend, workers, shared)
    if cfg.dry_run:
        return

    facts = facts_of(cfg, spec, model, prompts, rows, tokenizer, backend)
    run = open_run(NAME, cfg, facts | ({"anchor": anchor.rows.fingerprint} if anchor else {}), group)
    backend.seed(cfg.seed + backend.rank)  # each worker draws its own dropout
    kept = [*VALIDATIONS.values(), *RunFiles.NAMES]
    session = Session(run, backend, cfg.every(), SHOWN, files=kept, anchor=anchor)
    files = RunFiles(run.path, cfg.model, spec, tokenizer)
    if backend.is_main:
        write_json(run.path / "training_config.json", dataclasses.asdict(cfg))
        if spec and not session.resumed:
            cfg.set_scales(model, spec, rows)
            files.keep_start(model, trained=cfg.checkpoint is not None)
    model = placed(model, backend, shared)
    set_up_blocks(model, backend, cfg.gradient_checkpointing and backend.wants_recomputation, cfg.compile)

    def evaluate(step: int) -> dict[str, float]:
        write_history(run)
        return glance(sampler, model, cfg.seed)

    validate = functools.partial(
        write_validation, run.path, sampler, model, cfg.model, cfg.validation_samples, cfg.seed
    )
    try:
        validate("baseline")
        if sft:
            warm_up(model, rows, sft, session, evaluate)
            files.save(model, "sft_model", backend)
            validate("post_sft")
        if grpo.steps:
            frozen = files.reference(cfg.reference, bool(sft), backend) if cfg.beta else None
            reference = placed(frozen, backend, shared) if frozen else None
            reinforce(model, reference, prompts, judge_of(questions, sampler), grpo, session, evaluate)
    finally:  # also when the run is stopped
        write_history(run)
    files.save(model, "model", backend)
    validate("final")
    cost = session.cost()
    if backend.is_main:
        conclude(run, cfg.max_new_tokens, cost)


def warm_up(model: nn.Module, rows: TextDataset, plan: Plan, session: Session, evaluate: Callable) -> None:
    """SFT: next-token cross-entropy on good answers."""
    backend = session.backend
    model.train()
    for update in plain_stage("sft", model, rows, plan, session, evaluate):  # resumes, evaluates, saves in between
        for batch in update:  # on the device
            with backend.autocast():
                loss = text_loss(model, batch)
            backend.backward(loss)
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
        if session.anchor:
            session.anchor.add_to(update, model)
        norm = update.step()  # reduces over workers, clips, steps
        update.record(grad_norm=norm)


def reinforce(
    model: nn.Module, reference: nn.Module | None, prompts: PromptDataset, judge: Judge, plan: GRPOPlan,
    session: Session, evaluate: Callable,
) -> None:  # fmt: skip
    """GRPO: the model answers each prompt several times and learns from how each answer compares with the others.

    reference: the frozen model for the KL, on the device; None if the plan's beta is 0.
    """
    backend = session.backend
    for update in grpo_stage(model, prompts, plan, session, evaluate):  # resumes, evaluates and saves in between
        rollouts = roll_out(model, update, judge, plan, backend)  # answers and their rewards
        update.add(loss=Share(0.0))
        without_dropout(model)
        for part in rollouts.parts:  # prompts whose answers have different rewards
            loss, metrics = policy_loss(model, reference, part, plan, backend)  # forward and loss
            backend.backward(loss)
            update.add(**metrics)
            backend.step_boundary()
        if session.anchor:
            session.anchor.add_to(update, model)
        norm = update.step() if rollouts.parts or session.anchor else 0.0  # reduces over workers, clips, steps
        update.record(**rollouts.metrics, grad_norm=norm)


def shortened(cfg: Config, workers: int) -> Config:
    few = max(8 + -8 % workers, cfg.update_facts(workers)["rows_per_update"])
    conversations = min(few, max(1, cfg.sft_batch_size // workers) * workers)
    return dataclasses.replace(
        cfg, num_samples=few, epochs=1, sft_epochs=1, sft_batch_size=conversations,
        validation_samples=1,
    )  # fmt: skip


def check(cfg: Config) -> None:
    prompts = cfg.num_samples * cfg.max_prompt_length * (8 + 8)  # tokens, as lists and as a tensor
    check_memory(prompts, f"--num-samples {cfg.num_samples}", "--num-samples")
    check_samples("--validation-samples", cfg.validation_samples)
    check_updates(cfg, 1)
    if has_sft(cfg) and cfg.sft_batch_size > cfg.num_samples:
        raise UserError(
            f"--sft-batch-size {cfg.sft_batch_size} must be from 1 to --num-samples {cfg.num_samples}; lower it, or "
            "raise --num-samples"
        )
    if not has_sft(cfg) and (cfg.sft_only or not (cfg.epochs if cfg.max_steps is None else cfg.max_steps)):
        grpo = f"--epochs {cfg.epochs}" if cfg.max_steps is None else f"--max-steps {cfg.max_steps}"
        sft = f"--sft-epochs {cfg.sft_epochs}" if cfg.sft or cfg.sft_only else "no --sft"
        raise UserError(f"{sft} and {'--sft-only' if cfg.sft_only else grpo} leave nothing to train; change one")
    length = cfg.max_prompt_length + cfg.max_new_tokens
    check_length(cfg.model, length, "--max-prompt-length and --max-new-tokens", mixed=True)


def check_updates(cfg: Config, workers: int) -> None:
    """Raise UserError unless the questions fill an update, and its SFT conversations can be shared out."""
    rows, each = cfg.update_facts(workers)["rows_per_update"], "--batch-size times --accumulation-steps"
    if cfg.num_samples < rows:
        raise UserError(
            f"--num-samples {cfg.num_samples} does not fill an update of {rows} prompts ({each}"
            f"{f' times {workers} workers' if workers > 1 else ''}); raise it, or lower one of them"
        )
    if has_sft(cfg) and cfg.sft_batch_size % workers:
        raise UserError(
            f"--sft-batch-size {cfg.sft_batch_size} does not divide by {workers} workers; give a multiple of that "
            "number"
        )


def has_sft(cfg: Config) -> bool:
    return (cfg.sft or cfg.sft_only) and cfg.sft_epochs > 0


def most_rows(cfg: Config, workers: int = 1) -> int:
    """The rows of the largest micro-batch on all workers."""
    return max(cfg.batch_size * workers, cfg.sft_batch_size if has_sft(cfg) else 1)


def sft_plan(cfg: Config, workers: int = 1) -> Plan:
    steps = checked_updates(cfg.sft_epochs * cfg.num_samples // cfg.sft_batch_size, "--sft-epochs", cfg.sft_epochs)
    return Plan(
        steps=steps, batch_size=cfg.sft_batch_size // workers, accumulation=1,
        learning_rate=cfg.sft_learning_rate, warmup_steps=WARMUP, clip_grad_norm=cfg.clip_grad_norm, seed=cfg.seed,
    )  # fmt: skip


def grpo_plan(cfg: Config, ends: tuple[int, ...], workers: int = 1) -> GRPOPlan:
    steps = cfg.epochs * cfg.num_samples // cfg.update_facts(workers)["rows_per_update"]
    steps = checked_updates(steps, "--epochs", cfg.epochs) if cfg.max_steps is None else cfg.max_steps
    return GRPOPlan(
        steps=0 if cfg.sft_only else steps, batch_size=cfg.batch_size, accumulation=cfg.accumulation_steps,
        learning_rate=STILL if cfg.control == "still" else cfg.learning_rate, warmup_steps=WARMUP,
        clip_grad_norm=cfg.clip_grad_norm, seed=cfg.seed, group=cfg.num_generations, length=cfg.max_new_tokens,
        ends=ends, sampling=Sampling(cfg.temperature, cfg.top_k, cfg.top_p),
        objective=Objective(reduction=cfg.loss_type, beta=cfg.beta), scale=cfg.scale_rewards,
        shuffled=cfg.control == "shuffled",
    )  # fmt: skip


# -- the steps -------------------------------------------------------------------------------------------------------
def facts_of(cfg: Config, spec, model: nn.Module, prompts: PromptDataset, rows, tokenizer, backend) -> dict:
    """The inputs of the run, for its manifest. spec: its quantisers, if any; rows: good answers, if it has an SFT."""
    on_main = backend.group.on_main
    asked = fingerprint(Rows(prompts.prompts.tokens.int(), prompts.prompts.mask.byte()))
    return {
        **backend.facts, "prompts": asked, "answers": rows.fingerprint if rows else None,
        **cfg.update_facts(backend.world_size), "base": on_main(lambda: model.fingerprint),
        "model files": on_main(lambda: speech_files(cfg.model)), **template_facts(tokenizer, cfg.chat_template),
        **on_main(lambda: cfg.start_facts(spec)),
    }  # fmt: skip


def detect_device_type() -> str:
    """The device that a run without --device uses: "tpu", "cuda" or "cpu"."""
    return "tpu" if has_static_shapes() else resolve()


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    model has no weights, all prompts are zeros, and answers have no text."""
    model = backend.place(prepared(cfg.empty_policy(cfg.student_spec(), planned_name(cfg.model))))
    sampler = BobSampler.of(model, PlannedTokenizer(), backend, cfg.max_prompt_length, cfg.max_new_tokens)

    def original() -> nn.Module:
        return backend.place(empty_model(planned_name(cfg.model)).requires_grad_(False))

    def evaluate(step: int) -> dict[str, float]:
        return glance(sampler, model, cfg.seed)

    with backend.phase("validation"):  # of one question: a batch is filled up, so all batches have one shape
        validation_of(sampler, model, original(), cfg.validation_samples, Sampling(), questions=heldout_questions()[:1])
    sft, grpo = sft_plan(cfg) if has_sft(cfg) else None, grpo_plan(cfg, sampler.ends)
    anchor = cfg.planned_anchor(most_rows(cfg))
    if sft:
        row = torch.zeros(cfg.max_prompt_length + cfg.max_new_tokens, dtype=torch.long)
        rows = SameRows(sft.batch_size, tokens=row, mask=torch.ones_like(row, dtype=torch.uint8))
        warm_up(model, rows, sft, backend.rehearsal(sft.batch_size * len(row), anchor), evaluate)
    if grpo.steps:
        row, rewards = torch.zeros(cfg.max_prompt_length, dtype=torch.long), itertools.count()
        mask, number = torch.ones_like(row, dtype=torch.bool), torch.tensor(0)
        prompts = SameRows(grpo.batch_size, tokens=row, mask=mask, number=number)
        tokens = grpo.accumulation * grpo.batch_size * (len(row) + grpo.group * grpo.length)
        session = backend.rehearsal(tokens, anchor)
        reference = original() if cfg.beta else None
        reinforce(model, reference, prompts, lambda *_: (float(next(rewards)), {}), grpo, session, evaluate)
    return memory_of(model, sft, grpo, cfg.max_prompt_length, cfg.anchor_length(), cfg.gradient_checkpointing, backend)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
