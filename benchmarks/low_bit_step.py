"""How much longer do a GRPO step and a fine-tuning update take with quantised weights than in full precision?

    python benchmarks/low_bit_step.py
    python benchmarks/low_bit_step.py --quantizer int2/g64 --steps 15

A GRPO step is a rollout and an update, as in grpo_step.py; its reference is in full precision on both sides. A
fine-tuning update trains all weights but embedding and head on packed legal questions, as train_cot_sft.py --method
full. The steps of both sides alternate in one run and begin with the same rows; the first pair is not counted. Each
side samples its own answers, so the ratio of GRPO is also given per sampled token. Memory is the peak resident memory
of a process that takes two steps of each kind on one side.
"""

import time
from dataclasses import dataclass
from statistics import median

from grpo_step import RATE, Ours
from one_update import update
from sft_step import alone
from torch import nn

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.supervised import PackedExamples, encoded
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import checked_rows, document
from qat_lora.experiments.legal.rules import generate
from qat_lora.experiments.legal.sections import NUMBERS
from qat_lora.hosts.revision import revision
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.models.loading import EMBEDDED, load_model, load_tokenizer
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, freeze_plain_tables, quantize
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.loop import Plan
from qat_lora.train.supervised import packed_loss

SIDES = ("both", "full", "low")


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = option(EMBEDDED, "instruct model")
    quantizer: str = option("int4/g32", "quantiser of MLP and attention")
    batch_size: int = option(4, "prompts per GRPO step", at_least=1)
    num_generations: int = option(8, "answers per prompt", at_least=2)
    max_prompt_length: int = option(56, "tokens to which prompts are padded")
    max_completion_length: int = option(32, "longest answer, in tokens", at_least=1)
    beta: float = option(0.02, "weight of the KL to the reference", at_least=0)
    length: int = option(1024, "tokens of the packed row of a fine-tuning update")
    steps: int = option(7, "timed pairs, after one that is not counted", at_least=1)
    side: str = option("both", "both sides; or only full or low, to measure its peak memory")


def main(cfg: Config) -> None:
    if cfg.side not in SIDES:
        raise UserError(f"--side {cfg.side!r} is not one of {', '.join(SIDES)}")
    backend = open_backend(cfg.device, cfg.precision)
    kinds = {"GRPO step": grpo_steps, "fine-tuning update": tuning_steps}
    if cfg.side != "both":
        for steps in kinds.values():
            step = steps(cfg, backend, policy(cfg, cfg.side))
            for _ in range(2):
                step()
        return print(f"peak_memory_mb {backend.peak_memory_mb():.0f}")
    print(f"{cfg.model} on {backend}, {cfg.quantizer}, seed {cfg.seed}, commit {revision()}", flush=True)
    for kind, steps in kinds.items():
        sides = [steps(cfg, backend, policy(cfg, side)) for side in ("low", "full")]
        if not cfg.dry_run:
            report(kind, [[timed(step) for step in sides] for _ in range(cfg.steps + 1)][1:])
    if not cfg.dry_run:
        low, full = (alone(side) for side in ("low", "full"))
        print(f"peak memory: quantised {low:.0f} MB, full precision {full:.0f} MB, ratio {low / full:.2f}")


def policy(cfg: Config, side: str) -> nn.Module:
    model = load_model(cfg.model)
    if side == "low":
        initialise(quantize(model, StudentSpec(cfg.quantizer, cfg.quantizer)))
    return norms_in_one_step(freeze_plain_tables(model))


def grpo_steps(cfg: Config, backend: TorchBackend, model: nn.Module):
    """A function that takes a GRPO step and returns the number of sampled tokens."""
    ours = Ours(cfg, backend, model)

    def step() -> float:
        ours()
        return ours.length * cfg.batch_size * cfg.num_generations

    return step


def tuning_steps(cfg: Config, backend: TorchBackend, model: nn.Module):
    """A function that takes a fine-tuning update and returns the number of its tokens."""
    tokenizer = load_tokenizer(cfg.model)
    rows = checked_rows(list(generate(8 * (cfg.steps + 1), cfg.seed)))
    examples = [encoded(row["id"], document(row, tokenizer), tokenizer) for row in rows]
    packed = PackedExamples(examples, cfg.length, (1.0,) * len(NUMBERS), tokenizer.eos_token_id)
    stream, model = backend.prefetch(batches(packed, 1, 1, cfg.seed)), backend.place(model).train()
    plan, optimizer = Plan(1, 1, 1, RATE, 0, 1.0, cfg.seed), new_optimizer(model, RATE, backend)

    def step() -> float:
        float(update(model, stream, packed_loss, optimizer, plan, backend)["loss"])  # waits for the device
        return cfg.length

    return step


def timed(step) -> tuple[float, float]:
    """(seconds, tokens) of a step."""
    started = time.monotonic()
    tokens = step()
    return time.monotonic() - started, tokens


def report(kind: str, pairs: list) -> None:
    ratios = sorted(low / full for (low, _), (full, _) in pairs)
    each = median((low / tokens) / (full / others) for (low, tokens), (full, others) in pairs)
    low, full = (median(pair[side][0] for pair in pairs) for side in (0, 1))
    print(
        f"{kind}: quantised {low:.2f} s, full precision {full:.2f} s, ratio {median(ratios):.3f} "
        f"({ratios[0]:.3f}–{ratios[-1]:.3f}), per token {each:.3f}, {len(pairs)} pairs",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main, Config, "low_bit_step", __doc__)
