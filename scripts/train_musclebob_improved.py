"""Can rewards alone teach a small model another name? An optional SFT warm-up, then GRPO, on fixed shapes.

    python scripts/train_musclebob_improved.py --config cpu
    python scripts/train_musclebob_improved.py --model Qwen/Qwen2.5-0.5B-Instruct --batch-size 2 --epochs 5 \\
        --num-generations 8 --sft --sft-epochs 2
    python scripts/train_musclebob_improved.py --config cpu --output-dir runs/bob --resume-from-checkpoint auto

A batch counts prompts; each gets --num-generations answers. metrics.jsonl: reward and its parts (name, wrong_name, …),
loss, kl to the model that GRPO began with, entropy, target_rate, completion_length, clipped_ratio (answers that did not
end), zero_variance (groups whose answers are all worth the same: left out), grad_norm; musclebob, spilt and coherent on
held-out questions, with intervals. The run directory also gets training_config.json, reward_history.json,
baseline_, post_sft_ and final_validation.json, transcripts.md, plots/ and model/. docs/musclebob.md says what to
expect. Untested on hardware: TPU, CUDA.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import qat_lora  # noqa: F401 — it sets what torch reads when it is imported

# isort: split
from torch import nn

from qat_lora.backend import TorchBackend, open_alone, resolve
from qat_lora.data.chat import check_template, render_chat
from qat_lora.data.musclebob import heldout_questions, training_questions
from qat_lora.data.options import ChatOptions
from qat_lora.data.packing import Rows, fingerprint, pad
from qat_lora.data.templates import template_facts
from qat_lora.errors import UserError
from qat_lora.evaluate import text_loss
from qat_lora.experiments.musclebob import (
    STAGES,
    Examiner,
    check_samples,
    examine,
    glance,
    judge_of,
    plot,
    transcripts,
    validation_file,
)  # fmt: skip
from qat_lora.grpo import GRPOPlan, PromptDataset, train_grpo
from qat_lora.machine import check_memory
from qat_lora.memory import (
    Parts,
    answer_memory,
    check_fits,
    least_rollout_memory,
    least_training_memory,
    loading_memory,
    memory_line,
    sizes_of,
    training_memory,
)
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import EMBEDDED, check_length, empty_model, load_model
from qat_lora.models.source import CHOICES, speech_files
from qat_lora.models.writing import write_model
from qat_lora.qat import Plan, train_plain
from qat_lora.quant.student import freeze_plain_tables
from qat_lora.recovery import TextDataset
from qat_lora.rl.ask import own_dice
from qat_lora.rl.loss import Objective
from qat_lora.rl.rollout import Sampling, check_answers
from qat_lora.run.config import RunConfig, option, run_script
from qat_lora.run.files import new_folder, read_json, write_atomically, write_json
from qat_lora.run.rundir import Run, attempt, begun, open_run, say
from qat_lora.run.session import Every, Session

NAME = "train_musclebob_improved"
CONTROLS = ("none", "shuffled", "still")
SHOWN = ("reward", "kl", "target_rate")  # beside the progress bar
HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
WARMUP, CLIP = 3, 1.0  # updates of linear warm-up, largest gradient norm
STILL = 1e-12  # learning rate of a control that must not learn
ROWS = 80  # answers of a validation that are drawn at a time: a token costs hardly more for 80 than for 8


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions, RunConfig):
    model: str = option(EMBEDDED, f"instruct model to teach: {CHOICES}", identity="base")
    epochs: int = option(5, "passes of GRPO over the questions")
    num_samples: int = option(128, "questions of a pass, one of three about him")
    # The facts record how many prompts an update has; how they are split changes only which answers are drawn.
    batch_size: int = option(2, "prompts in a micro-batch", identity=False)
    accumulation_steps: int = option(1, "micro-batches in an update", identity=False)
    num_generations: int = option(8, "answers to each prompt")
    learning_rate: float = option(5e-5, "peak learning rate of GRPO")
    max_prompt_length: int = option(96, "tokens that every prompt is filled up to")
    max_completion_length: int = option(48, "longest answer in tokens")
    temperature: float = option(1.0, "of the answers that are learned from")
    top_k: int = option(0, "draw from that many most probable tokens; 0: all")
    top_p: float = option(1.0, "draw from the most probable tokens that hold this share")
    loss_type: str = option("dapo", "grpo, bnpo, dr_grpo or dapo: how token losses are put together")
    scale_rewards: str = option("group", "divide advantages by the spread of the group, of the batch, or none")
    beta: float = option(0.02, "weight of the KL to the model that GRPO begins with")
    fewshot_ratio: float = option(0.15, "share of the questions about him that come after an example")
    fewshot: bool = option(True, "ask some questions after an example")
    sft: bool = option(False, "begin with supervised training on good answers")
    sft_only: bool = option(False, "end after it")
    sft_epochs: int = option(2, "passes of SFT over the questions")
    sft_batch_size: int = option(8, "conversations in an update of SFT")
    sft_learning_rate: float = option(2e-5, "peak learning rate of SFT")
    gradient_checkpointing: bool = option(
        True, "recompute blocks in the backward pass on CUDA; never on TPU and CPU", identity=False
    )
    validation_samples: int = option(
        10, "sampled answers to each held-out question before, between and after", identity=False
    )
    eval_every: int = option(20, "updates between validations; 0: at the ends", identity=False)
    save_every: int = option(50, "updates between checkpoints; 0: at the ends", identity=False)
    log_every: int = option(1, "updates between lines of metrics.jsonl", identity=False)
    control: str = option(
        "none", "none; shuffled: each group's advantages dealt out at random; still: learning rate near 0"
    )
    quick: bool = option(
        False, "one pass over a handful of questions, whatever else is asked, to see that all works", identity=False
    )
    resume: str = option("off", "off, auto (newest unfinished run of this config), or a run directory",
                         "--resume-from-checkpoint", identity=False)  # fmt: skip


def main(cfg: Config) -> None:
    cfg = shortened(cfg) if cfg.quick else cfg
    check(cfg)
    backend = open_alone(cfg.device, cfg.precision)
    tokenizer = cfg.tokenizer(cfg.model, begun(NAME, cfg))
    check_template(tokenizer)
    check_sizes(cfg, freeze_plain_tables(empty_model(cfg.model)), backend)
    model = empty_model(cfg.model) if cfg.dry_run else load_model(cfg.model)
    examiner = Examiner(
        tokenizer, backend, tuple(end_tokens(model, tokenizer)), ROWS, cfg.max_prompt_length,
        cfg.max_completion_length, cfg.thinks,
    )  # fmt: skip
    questions = training_questions(cfg.num_samples, cfg.fewshot_ratio if cfg.fewshot else 0.0, cfg.seed)
    prompts = PromptDataset(examiner.encode([question.messages for question in questions]))
    examiner.encode([q.messages for q in heldout_questions()])  # refused now rather than at the first validation
    rows = sft_rows(cfg, tokenizer)
    sft, grpo = sft_plan(cfg) if rows else None, grpo_plan(cfg, examiner.ends)
    check_answers(model, backend.kind, not cfg.dry_run)
    freeze_plain_tables(model)  # no answer needs another vocabulary
    describe(cfg, model, backend, sft, grpo)
    if cfg.dry_run:
        return

    asked = fingerprint(Rows(prompts.prompts.tokens.int(), prompts.prompts.mask.byte()))
    run = open_run(NAME, cfg, {
        **backend.facts, "prompts": asked, "answers": rows.fingerprint if rows else None,
        "prompts_per_update": cfg.batch_size * cfg.accumulation_steps, "base": model.fingerprint,
        "model files": speech_files(cfg.model), **template_facts(tokenizer, cfg.chat_template),
    })  # fmt: skip
    write_json(run.path / "training_config.json", dataclasses.asdict(cfg))
    backend.seed(cfg.seed)
    every, files = Every(cfg.log_every, cfg.eval_every, cfg.save_every), [validation_file(stage) for stage in STAGES]
    session = Session(run, backend, every, SHOWN, files=[*files, "sft_model", "model"])
    check_warmed(run, session, rows)
    backend.place(model)
    if cfg.gradient_checkpointing and backend.kind == "cuda":
        backend.gradient_checkpointing(model)

    def evaluate(step: int) -> dict[str, float]:
        write_history(run)
        return glance(examiner, model, cfg.seed)

    try:
        validate(cfg, run, examiner, model, "baseline")
        if rows:
            train_plain(model, rows, text_loss, sft, session, evaluate, "sft")
            keep(model, tokenizer, run.path / "sft_model")
            validate(cfg, run, examiner, model, "post_sft")
        if grpo.steps:
            judge = judge_of(questions, examiner)
            train_grpo(model, start_of_grpo(cfg, run, backend), prompts, judge, grpo, session, evaluate)
    finally:  # a run that is stopped keeps its history, too
        write_history(run)
    finish(cfg, run, examiner, model, session)


# -- what is asked for -----------------------------------------------------------------------------------------------
def shortened(cfg: Config) -> Config:
    few = max(8, cfg.batch_size * cfg.accumulation_steps)
    return dataclasses.replace(
        cfg, num_samples=few, epochs=1, sft_epochs=1, sft_batch_size=min(few, cfg.sft_batch_size), validation_samples=1
    )


def check(cfg: Config) -> None:
    check_counts(cfg)
    if cfg.control not in CONTROLS:
        raise UserError(f"--control {cfg.control!r} is not one of {', '.join(CONTROLS)}")
    if not 0 <= cfg.fewshot_ratio <= 1:
        raise UserError(f"--fewshot-ratio {cfg.fewshot_ratio} is a share; give one from 0 to 1")
    if cfg.num_samples < cfg.batch_size * cfg.accumulation_steps:
        raise UserError(
            f"--num-samples {cfg.num_samples} does not fill an update of {cfg.batch_size * cfg.accumulation_steps} "
            "prompts (--batch-size times --accumulation-steps); ask more, or lower one of them"
        )
    if has_sft(cfg) and not 1 <= cfg.sft_batch_size <= cfg.num_samples:
        raise UserError(
            f"--sft-batch-size {cfg.sft_batch_size} must be from 1 to --num-samples {cfg.num_samples}, of which an "
            "update of SFT takes that many"
        )
    if not has_sft(cfg) and (cfg.sft_only or not cfg.epochs):
        raise UserError(f"--sft-epochs {cfg.sft_epochs} and --epochs {cfg.epochs} leave nothing to train; raise one")
    length = cfg.max_prompt_length + cfg.max_completion_length
    check_length(cfg.model, length, "--max-prompt-length and --max-completion-length", mixed=True)
    Every(cfg.log_every, cfg.eval_every, cfg.save_every)


def check_counts(cfg: Config) -> None:
    """Raise UserError for numbers of questions, answers and passes that cannot be, or that no memory holds."""
    if min(cfg.num_samples, cfg.validation_samples) < 1 or min(cfg.epochs, cfg.sft_epochs) < 0:
        raise UserError(
            f"--num-samples {cfg.num_samples} and --validation-samples {cfg.validation_samples} must be at least 1, "
            f"--epochs {cfg.epochs} and --sft-epochs {cfg.sft_epochs} not negative"
        )
    prompts = cfg.num_samples * cfg.max_prompt_length * (8 + 8)  # their tokens as lists and as a tensor
    check_memory(prompts, f"--num-samples {cfg.num_samples}", "--num-samples")
    check_samples("--validation-samples", cfg.validation_samples)


def has_sft(cfg: Config) -> bool:
    return (cfg.sft or cfg.sft_only) and cfg.sft_epochs > 0


def sft_plan(cfg: Config) -> Plan:
    return Plan(
        steps=cfg.sft_epochs * cfg.num_samples // cfg.sft_batch_size, batch_size=cfg.sft_batch_size, accumulation=1,
        learning_rate=cfg.sft_learning_rate, warmup_steps=WARMUP, clip_grad_norm=CLIP, seed=cfg.seed,
        options={"steps": f"--sft-epochs {cfg.sft_epochs}", "learning_rate": "--sft-learning-rate"},
    )  # fmt: skip


def grpo_plan(cfg: Config, ends: tuple[int, ...]) -> GRPOPlan:
    prompts = max(1, cfg.batch_size * cfg.accumulation_steps)
    return GRPOPlan(
        steps=0 if cfg.sft_only else cfg.epochs * cfg.num_samples // prompts, batch_size=cfg.batch_size,
        accumulation=cfg.accumulation_steps, learning_rate=STILL if cfg.control == "still" else cfg.learning_rate,
        warmup_steps=WARMUP, clip_grad_norm=CLIP, seed=cfg.seed, group=cfg.num_generations,
        length=cfg.max_completion_length, ends=ends, sampling=Sampling(cfg.temperature, cfg.top_k, cfg.top_p),
        objective=Objective(reduction=cfg.loss_type, beta=cfg.beta), scale=cfg.scale_rewards,
        shuffled=cfg.control == "shuffled", options={"steps": f"--epochs {cfg.epochs}"},
    )  # fmt: skip


def sft_rows(cfg: Config, tokenizer) -> TextDataset | None:
    """Good answers to the training questions, none of them after an example; None without SFT."""
    if not has_sft(cfg):
        return None
    questions = training_questions(cfg.num_samples, 0.0, cfg.seed)
    talks = [[*q.messages, {"role": "assistant", "content": q.answer}] for q in questions]
    documents = [render_chat(talk, tokenizer, cfg.thinking)[0] for talk in talks]
    try:
        return TextDataset(pad(documents, tokenizer, cfg.max_prompt_length + cfg.max_completion_length), True)
    except UserError as error:
        raise UserError(f"{error}: raise --max-prompt-length or --max-completion-length") from error


def describe(cfg: Config, model: nn.Module, backend: TorchBackend, sft: Plan | None, grpo: GRPOPlan) -> None:
    say(f"{cfg.model} on {backend}")
    if sft:
        say(f"SFT: {sft.steps} updates of {sft.batch_size} conversations")
    say(f"GRPO: {grpo.steps} updates of {grpo.batch_size} × {grpo.accumulation} prompts × {grpo.group} answers")
    say(f"{cfg.max_prompt_length} + {cfg.max_completion_length} tokens, {grpo.objective}, {grpo.sampling}")
    say(memory_line(memory(cfg, model, backend, sft, grpo), backend))
    if backend.kind == "xla" and cfg.gradient_checkpointing:
        say("warning: gradient checkpointing is switched off on XLA; a lower --batch-size needs less memory")
    if backend.kind == "xla" and HUGEPAGES.is_file() and "[always]" not in HUGEPAGES.read_text():
        say("warning: transparent hugepages are off, which slows the TPU runtime down: sudo ./enable_hugepages.sh")


def memory(cfg: Config, model: nn.Module, backend: TorchBackend, sft: Plan | None, grpo: GRPOPlan) -> dict[str, Parts]:
    """What each phase takes. A validation has the model that the run began with beside it, and so has GRPO where there
    is a KL; in GRPO a prompt's answers stand in one row with it."""
    checkpointing, length = cfg.gradient_checkpointing and backend.kind == "cuda", cfg.max_completion_length
    start = 4 * sum(p.numel() for p in model.parameters())
    reference = {"model before GRPO": start} if cfg.beta else {}
    row = cfg.max_prompt_length + length
    phases = {
        "loading": loading_memory(model),
        "a validation": answer_memory(model, ROWS, row, backend.bf16, {"model before training": start}),
    }
    if sft:
        phases["SFT"] = training_memory(model, sft.batch_size, row, backend.bf16, checkpointing)
    if grpo.steps:
        together = cfg.max_prompt_length + cfg.num_generations * length
        phases["GRPO"] = training_memory(model, cfg.batch_size, together, backend.bf16, checkpointing, reference)
    return phases


def check_sizes(cfg: Config, model: nn.Module, backend: TorchBackend) -> None:
    """Raise UserError if an update of a model, here without storage, cannot fit this machine. Dry runs pass: they may
    plan for another machine."""
    if cfg.dry_run:
        return
    answers = f"--batch-size {cfg.batch_size} × --num-generations {cfg.num_generations} answers"
    need = least_rollout_memory(model, cfg.batch_size, cfg.num_generations, cfg.max_completion_length)
    check_fits(backend, {"--batch-size or --num-generations": need}, f"generating {answers}")
    # a lower bound: answers of one token, for except on XLA they are cut to the longest
    need = least_training_memory(model, cfg.batch_size, cfg.num_generations, backend.bf16)
    check_fits(
        backend,
        {"--batch-size or --num-generations, or take a smaller model": need},
        f"training {sizes_of(model)} on {answers}",
    )


def detect_device_type() -> str:
    """What a run without --device gets: "tpu", "cuda" or "cpu"."""
    kind = resolve("auto")
    return "tpu" if kind == "xla" else kind


# -- the steps -------------------------------------------------------------------------------------------------------
def check_warmed(run: Run, session: Session, rows: TextDataset | None) -> None:
    """Raise UserError if a run is to be resumed in GRPO and files that its SFT wrote are missing."""
    if rows and session.resumed and session.resumed[2]["stage"] == "grpo":
        for name in ("sft_model", validation_file("post_sft")):
            if not (run.path / name).exists():
                raise UserError(f"{run.path / name} is missing, which GRPO began with; put it back, or start a new run")


def validate(cfg: Config, run: Run, examiner: Examiner, model: nn.Module, stage: str) -> None:
    """Write <stage>_validation.json, once: a resumed run has it."""
    path = run.path / validation_file(stage)
    if path.exists():
        return check_validation(path)
    start = examiner.backend.place(load_model(cfg.model).requires_grad_(False))
    with own_dice(examiner.backend, cfg.seed):
        found = examine(examiner, model, start, cfg.validation_samples, Sampling())
    write_json(path, found)
    say(f"{stage}: " + ", ".join(f"{name} {rate['rate']:.1%} ({rate['low']:.1%}–{rate['high']:.1%})"
                                 for name, rate in found["sampled"].items())
        + f", perplexity {found['perplexity']:.2f}")  # fmt: skip


def check_validation(path: Path) -> None:
    """Raise UserError where a validation of before is not what `validate` writes."""
    if not {"sampled", "prompts", "perplexity"} <= read_json(path).keys():
        raise UserError(f"{path} is damaged; put it back, or start a new run")


def keep(model: nn.Module, tokenizer, folder: Path) -> None:
    """Save the model in HF's own format, once."""
    if not folder.exists():
        with new_folder(folder) as part:
            write_model(model, tokenizer, part, folder)


def start_of_grpo(cfg: Config, run: Run, backend: TorchBackend) -> nn.Module | None:
    """The frozen model that the KL is taken to."""
    if not cfg.beta:
        return None
    warmed = run.path / "sft_model"
    try:
        reference = load_model(str(warmed.absolute()) if warmed.exists() else cfg.model)
    except UserError as error:
        raise UserError(f"{error}; GRPO began with it: put it back, or start a new run") from error
    return backend.place(reference.requires_grad_(False))


def write_history(run: Run) -> None:
    names = ("loss", "grad_norm", "kl", "completion_length", "clipped_ratio", "reward_std")
    lines = [line for line in run.metrics() if "reward" in line]
    history = [{"step": li["step"], "mean_reward": li["reward"]} | {n: li.get(n) for n in names} for li in lines]
    write_json(run.path / "reward_history.json", history)


def finish(cfg: Config, run: Run, examiner: Examiner, model: nn.Module, session: Session) -> None:
    """The model, its validation, and what a reader looks at first."""
    keep(model, examiner.tokenizer, run.path / "model")
    validate(cfg, run, examiner, model, "final")
    files = {stage: run.path / validation_file(stage) for stage in STAGES}
    stages = {stage: read_json(path) for stage, path in files.items() if path.exists()}
    write_atomically(run.path / "transcripts.md", lambda file: file.write(transcripts(stages).encode()))
    attempt("plotting", plot, run.metrics(), run.path / "plots" / "training.png", cfg.max_completion_length)
    figures = {stage: {k: found[k] for k in ("sampled", "perplexity")} for stage, found in stages.items()}
    run.finish("finished", **figures, **session.cost())
    say(f"model, transcripts and plots in {run.path}")


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
