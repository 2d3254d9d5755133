"""How many completion tokens per second does our fine-tuning learn, compared with TRL's SFTTrainer?

    USE_TORCH_XLA=0 PYTHONPATH=.venv/peers python benchmarks/sft_step.py
    USE_TORCH_XLA=0 PYTHONPATH=.venv/peers python benchmarks/sft_step.py --trl-loss chunked_nll --lora-dropout 0

Both sides use the same rows (generated legal questions), model, LoRA, precision and trained weights, and a learning
rate so small that neither model changes. A pair is one step of TRL's SFTTrainer over --batch-size examples, timed by
its callbacks, and one of ours over --rows packed rows right after it; the first two pairs are not counted. TRL pads
each batch to its longest example, because its packing needs FlashAttention. --trl-loss is TRL's loss_type: nll (its
default) or chunked_nll. The tokens counted are each side's target tokens. Memory is the peak resident memory of a
process that takes --memory-steps steps of one side. If torch_xla is installed, TRL's accelerate uses it unless
USE_TORCH_XLA=0 is set.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from one_update import update
from transformers import TrainerCallback

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.supervised import PackedExamples, encoded
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import checked_rows, document, messages, response
from qat_lora.experiments.legal.rules import generate
from qat_lora.experiments.legal.sections import NUMBERS
from qat_lora.hosts.revision import revision
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.lora.add import add_adapter
from qat_lora.lora.targets import PROJECTIONS
from qat_lora.models.loading import EMBEDDED, load_model, load_tokenizer
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.loop import Plan
from qat_lora.train.supervised import packed_loss

RATE, SKIPPED = 1e-9, 2
SIDES = ("both", "ours", "trl")


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = option(EMBEDDED, "instruct model")
    batch_size: int = option(5, "examples per step of TRL's")
    rows: int = option(1, "packed rows per step of ours")
    length: int = option(1024, "tokens per packed row")
    lora_r: int = option(32, "rank of both adapters", at_least=1)
    lora_alpha: float = option(64.0, "LoRA alpha of both adapters", above=0)
    lora_dropout: float = option(0.05, "LoRA dropout of both adapters", at_least=0, below=1)
    trl_loss: str = option("nll", "TRL's loss_type: nll or chunked_nll")
    steps: int = option(9, "timed pairs, after two that are not counted")
    memory_steps: int = option(6, "steps after which the peak memory of a side is read; 0: do not measure memory")
    side: str = option("both", "both sides; or only ours or trl, to measure its peak memory without times")


def main(cfg: Config) -> None:
    if min(cfg.steps, cfg.batch_size, cfg.rows) < 1 or cfg.memory_steps < 0 or cfg.side not in SIDES:
        raise UserError(
            f"--steps {cfg.steps}, --batch-size {cfg.batch_size} and --rows {cfg.rows} must be at least 1, "
            f"--memory-steps {cfg.memory_steps} at least 0, and --side {cfg.side!r} one of {', '.join(SIDES)}"
        )
    if cfg.side != "both" and not cfg.memory_steps:
        raise UserError(f"--side {cfg.side} measures memory, but --memory-steps is 0; use at least 1")
    backend = open_backend(cfg.device, cfg.precision)
    rows = checked_rows(list(generate(64 * cfg.batch_size, cfg.seed)))
    if cfg.side == "both":
        print(
            f"{cfg.model} on {backend}: TRL {cfg.batch_size} examples ({cfg.trl_loss}), ours {cfg.rows} × "
            f"{cfg.length} tokens, LoRA {cfg.lora_r}, dropout {cfg.lora_dropout}, seed {cfg.seed}, "
            f"commit {revision()}",
            flush=True,
        )
    ours = Ours(cfg, backend, rows) if cfg.side != "trl" else None
    if cfg.dry_run:
        return
    if cfg.side == "ours":
        for _ in range(cfg.memory_steps):
            ours()
    else:
        pairs = run_pairs(cfg, backend, ours, rows)
    if cfg.side != "both":
        return print(f"peak_memory_mb {backend.peak_memory_mb():.0f}")
    report(pairs[SKIPPED:])
    if cfg.memory_steps:
        memory = {side: alone(side) for side in SIDES[1:]}
        print(
            f"peak memory, each in its own process: ours {memory['ours']:.0f} MB, TRL {memory['trl']:.0f} MB, "
            f"ours / TRL {memory['ours'] / memory['trl']:.2f}"
        )


def report(pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (median(column) for column in zip(*pairs))
    print(f"completion tokens per second: ours {ours:.0f}, TRL {theirs:.0f}")
    print(f"ours / TRL: {median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}), {len(pairs)} pairs")


def alone(side: str) -> float:
    """Peak memory of one side in MB, measured in its own process with the options of this one."""
    done = subprocess.run([sys.executable, *sys.argv, "--side", side], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("peak_memory_mb")]
    if done.returncode or not found:
        raise UserError(f"--side {side} failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(found[-1].split()[1])


class Ours:
    """Our training; each call takes one step and returns its completion tokens per second."""

    def __init__(self, cfg: Config, backend: TorchBackend, rows: list[dict]):
        tokenizer = load_tokenizer(cfg.model)
        examples = [encoded(row["id"], document(row, tokenizer), tokenizer) for row in rows]
        longest = max(len(example.tokens) for example in examples)
        if longest > cfg.length:
            raise UserError(f"--length {cfg.length} is too short for the longest example; use at least {longest}")
        packed = PackedExamples(examples, cfg.length, (1.0,) * len(NUMBERS), tokenizer.eos_token_id)
        base = load_model(cfg.model).requires_grad_(False)
        adapted = add_adapter(base, cfg.lora_r, cfg.lora_alpha, PROJECTIONS, cfg.seed, cfg.lora_dropout)
        self.backend, self.model = backend, backend.place(adapted).train()
        self.plan = Plan(steps=1, batch_size=cfg.rows, accumulation=1, learning_rate=RATE, warmup_steps=0,
                         clip_grad_norm=1.0, seed=cfg.seed)  # fmt: skip
        self.optimizer = new_optimizer(self.model, RATE, backend)
        self.stream = counted(backend.prefetch(batches(packed, cfg.rows, 1, cfg.seed)), self)

    def __call__(self) -> float:
        started = time.monotonic()
        figures = update(self.model, self.stream, packed_loss, self.optimizer, self.plan, self.backend)
        float(figures["loss"])  # waits for the device
        return self.learned / (time.monotonic() - started)


def counted(stream, side: Ours):
    for batch in stream:
        side.learned = int((batch["sections"] > 0).sum())
        yield batch


class Turns(TrainerCallback):
    """Times TRL's steps, and runs one of ours after each."""

    def __init__(self, ours: Ours | None, learned: list[int], backend: TorchBackend):
        self.ours, self.learned, self.backend, self.pairs = ours, learned, backend, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.learned.clear()
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.backend.kind == "cuda":  # otherwise TRL's queued work would be missing from its time
            torch.cuda.synchronize()
        theirs = sum(self.learned) / (time.monotonic() - self.started)
        if self.ours:
            self.pairs.append((self.ours(), theirs))
            print(f"ours {self.pairs[-1][0]:.0f}, TRL {theirs:.0f} completion tokens/s", flush=True)


def run_pairs(cfg: Config, backend: TorchBackend, ours: Ours | None, rows: list[dict]) -> list[tuple[float, float]]:
    """(ours, TRL's) completion tokens per second of each pair."""
    try:
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise UserError(f"trl cannot be imported ({error}); make bench-sft installs it") from error

    learned: list[int] = []

    class Trainer(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            learned.append(int((inputs["labels"][:, 1:] != -100).sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    talks = [
        {"prompt": messages(row["question"]), "completion": [{"role": "assistant", "content": response(row)}]}
        for row in rows
    ]
    lora = LoraConfig(
        r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        task_type="CAUSAL_LM",
        target_modules=[f"{name}_proj" for name in PROJECTIONS],
    )
    with TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder, per_device_train_batch_size=cfg.batch_size, learning_rate=RATE, bf16=backend.bf16,
            max_steps=cfg.memory_steps if ours is None else cfg.steps + SKIPPED, use_cpu=backend.kind == "cpu",
            gradient_checkpointing=False, save_strategy="no", report_to="none", logging_strategy="no",
            disable_tqdm=True, seed=cfg.seed, loss_type=cfg.trl_loss, max_length=cfg.length,
        )  # fmt: skip
        turns = Turns(ours, learned, backend)
        trainer = Trainer(
            load_model(cfg.model), args=settings, train_dataset=Dataset.from_list(talks), peft_config=lora,
            processing_class=load_tokenizer(cfg.model), callbacks=[turns],
        )  # fmt: skip
        if trainer.args.device.type != backend.device.type:
            raise UserError(
                f"TRL runs on {trainer.args.device}, ours on {backend}; set USE_TORCH_XLA=0 for this command"
            )
        trainer.train()
    return turns.pairs


if __name__ == "__main__":
    run_script(main, Config, "sft_step", __doc__)
