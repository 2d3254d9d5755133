"""How long does a GRPO step (rollout and update) take, compared with TRL's? The steps of both alternate in one run.

    USE_TORCH_XLA=0 PYTHONPATH=.venv/peers python benchmarks/grpo_step.py
    USE_TORCH_XLA=0 PYTHONPATH=.venv/peers python benchmarks/grpo_step.py --precision fp32 --steps 5

Both sides use the same model, prompts, group size, lengths, precision and trained weights (embedding and head frozen,
KL to a reference), and a learning rate so small that neither model changes. Each side samples its own answers. The
reward is a checksum of the text, so hardly any group has equal rewards; our trainer would leave such groups out of the
update, TRL computes them. A pair is one step of TRL's GRPOTrainer, timed by its callbacks, and one of ours right after
it; the first pair is not counted. The rates are answers (prompts × group size) per second. TRL generates with
transformers, not vLLM, and without gradient checkpointing. If torch_xla is installed, TRL's accelerate uses it unless
USE_TORCH_XLA=0 is set, and compiles a graph for every token.
"""

import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from qat_lora.backend import open_backend
from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.questions import training_questions
from qat_lora.experiments.musclebob.validation import BobSampler
from qat_lora.hosts.revision import revision
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import EMBEDDED, load_model, load_tokenizer
from qat_lora.models.writing import write_model
from qat_lora.quant.student import freeze_plain_tables
from qat_lora.rl.grpo import GRPOPlan, PromptDataset, policy_loss, prompt_stream, roll_out, without_dropout
from qat_lora.rl.objective import Objective
from qat_lora.rl.rollout import Sampling
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

RATE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = option(EMBEDDED, "instruct model")
    batch_size: int = option(4, "prompts per step")
    num_generations: int = option(8, "answers per prompt")
    max_prompt_length: int = option(56, "tokens to which our prompts are padded")
    max_completion_length: int = option(32, "longest answer, in tokens")
    beta: float = option(0.02, "weight of the KL to the reference")
    steps: int = option(7, "timed pairs, after one that is not counted")


def main(cfg: Config) -> None:
    if min(cfg.steps, cfg.batch_size) < 1:
        raise UserError(f"--steps {cfg.steps} and --batch-size {cfg.batch_size} must be at least 1")
    backend = open_backend(cfg.device, cfg.precision)
    print(
        f"{cfg.model} on {backend}, {cfg.batch_size}×{cfg.num_generations} answers of {cfg.max_completion_length} "
        f"tokens, seed {cfg.seed}, commit {revision()}",
        flush=True,
    )
    step = Ours(cfg, backend)
    if cfg.dry_run:
        return
    with TemporaryDirectory() as folder:
        pairs = run_pairs(cfg, backend, step, folder)[1:]
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    count = cfg.batch_size * cfg.num_generations
    ours, theirs = (median(column) for column in zip(*pairs))
    print(f"ours {count / ours:.2f} answers/s ({ours:.2f} s), TRL {count / theirs:.2f} ({theirs:.2f} s)")
    print(f"ours / TRL, answers/s: {median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}), {len(pairs)} pairs")
    print(f"our last step: {step.length:.1f} tokens per answer, {step.tied:.0%} of the groups with equal rewards")


def worth(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32


class Ours:
    """Our trainer; each call takes one step."""

    def __init__(self, cfg, backend, model: nn.Module | None = None):
        """cfg: a Config, or another with its options. model: by default, the one that cfg names."""
        self.tokenizer, model = load_tokenizer(cfg.model), model or load_model(cfg.model)
        self.questions = training_questions(64 * cfg.batch_size, 0.0, cfg.seed)
        ends = tuple(end_tokens(model, self.tokenizer))
        sampler = BobSampler(self.tokenizer, backend, ends, 1, cfg.max_prompt_length, cfg.max_completion_length)
        prompts = PromptDataset(sampler.encode([question.messages for question in self.questions]))
        self.plan = GRPOPlan(
            steps=1, batch_size=cfg.batch_size, accumulation=1, learning_rate=RATE, warmup_steps=0, clip_grad_norm=1.0,
            seed=cfg.seed, group=cfg.num_generations, length=cfg.max_completion_length, ends=ends, sampling=Sampling(),
            objective=Objective(beta=cfg.beta),
        )  # fmt: skip
        self.backend, self.model = backend, backend.place(norms_in_one_step(freeze_plain_tables(model)))
        self.reference = backend.place(load_model(cfg.model).requires_grad_(False)) if cfg.beta else None
        self.optimizer = new_optimizer(model, RATE, backend)
        self.stream = prompt_stream(prompts, self.plan, backend, 0)
        self.judge = lambda number, ids, ended: (worth(sampler.decode(ids)), {})

    def __call__(self) -> None:
        rollouts = roll_out(self.model, [next(self.stream)], self.judge, self.plan, self.backend)
        without_dropout(self.model)
        for part in rollouts.parts:
            loss, _ = policy_loss(self.model, self.reference, part, self.plan, self.backend)
            self.backend.backward(loss)
            self.backend.step_boundary()
        if rollouts.parts:
            float(self.backend.update(self.optimizer, self.plan.clip_grad_norm))  # waits for the device
        self.length, self.tied = (rollouts.metrics[name] for name in ("completion_length", "zero_variance"))


class Turns(TrainerCallback):
    """Times TRL's steps, and runs one of ours after each."""

    def __init__(self, ours: Ours):
        self.ours, self.pairs = ours, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.ours.backend.kind == "cuda":  # otherwise work that TRL has queued would count as our time
            torch.cuda.synchronize()
        theirs, started = time.monotonic() - self.started, time.monotonic()
        self.ours()
        self.pairs.append((time.monotonic() - started, theirs))
        print(f"ours {self.pairs[-1][0]:.2f} s, TRL {theirs:.2f} s", flush=True)


def run_pairs(cfg: Config, backend, ours: Ours, folder: str) -> list[tuple[float, float]]:
    """(our seconds, TRL's seconds) of each pair."""
    try:
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise UserError(f"trl cannot be imported ({error}); make bench-grpo installs it") from error

    def rewards(completions, **kwargs):
        return [worth(said[-1]["content"]) for said in completions]

    start = Path(folder) / "start"  # TRL loads the reference from the path of the trained model
    model = load_model(cfg.model)
    write_model(model, ours.tokenizer, start, start)
    rows = [{"prompt": list(question.messages)} for question in ours.questions]
    settings = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=cfg.batch_size * cfg.num_generations, max_steps=cfg.steps + 1,
        num_generations=cfg.num_generations, max_completion_length=cfg.max_completion_length, temperature=1.0,
        beta=cfg.beta, learning_rate=RATE, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, bf16=backend.bf16,
        use_cpu=backend.kind == "cpu", gradient_checkpointing=False, save_strategy="no", report_to="none",
        logging_steps=cfg.steps + 1, disable_tqdm=True, seed=cfg.seed,
    )  # fmt: skip
    turns = Turns(ours)
    trainer = GRPOTrainer(
        freeze_plain_tables(load_model(str(start))), rewards, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=ours.tokenizer, callbacks=[turns],
    )  # fmt: skip
    if trainer.args.device.type != backend.device.type:
        raise UserError(f"TRL runs on {trainer.args.device}, ours on {backend}; set USE_TORCH_XLA=0 for this command")
    trainer.train()
    return turns.pairs


if __name__ == "__main__":
    run_script(main, Config, "grpo_step", __doc__)
