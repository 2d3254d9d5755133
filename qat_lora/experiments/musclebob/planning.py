"""What a run will do and the memory that it needs: printed before it starts, and refused if it cannot fit."""

from pathlib import Path

from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.experiments.musclebob.validation import ROWS
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.quant.student import freeze_plain_tables
from qat_lora.rl.grpo import GRPOPlan
from qat_lora.run.console import say
from qat_lora.train.language_memory import (
    answer_memory,
    least_rollout_memory,
    loading_memory,
    sizes_of,
    training_memory,
)
from qat_lora.train.loop import Plan
from qat_lora.train.memory import Parts, check_fits, memory_line

HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def prepared(model: nn.Module) -> nn.Module:
    """A policy whose embedding and LM head are not trained unless they are quantised."""
    return norms_in_one_step(freeze_plain_tables(model))


def check_sizes(
    model: nn.Module, prompts: int, group: int, length: int, training: int, backend: TorchBackend, workers: int
) -> None:
    """Raise UserError if an update on `group` answers of at most `length` tokens to each of `prompts` prompts does not
    fit this machine. model: on the meta device, without storage. training: the least bytes of a worker's training."""
    answers = f"--batch-size {prompts} × --num-generations {group} answers"
    need = least_rollout_memory(model, prompts, group, length)
    check_fits(backend, {"--batch-size or --num-generations": need}, f"generating {answers}", workers)
    lower = "--batch-size or --num-generations, or take a smaller model"
    check_fits(backend, {lower: training}, f"training {sizes_of(model)} on {answers}", workers)


def memory_of(
    model: nn.Module, sft: Plan | None, grpo: GRPOPlan, prompt: int, anchor: int, checkpointing: bool,
    backend: TorchBackend, workers: int = 1,
) -> dict[str, Parts]:  # fmt: skip
    """The memory that each phase takes, with prompts of `prompt` tokens and rows of an anchor of `anchor` (0: none).
    A validation also holds the original model; GRPO also holds its reference model if beta is not 0. In GRPO a prompt
    and its answers share one row. workers: how many share the models out; to answer, each has all of the policy."""
    start = 4 * sum(p.numel() for p in model.parameters())
    reference = {"reference model": start // workers} if grpo.objective.beta else {}
    row, together = prompt + grpo.length, prompt + grpo.group * grpo.length

    def training(rows: int, length: int, beside: Parts | None) -> Parts:
        recompute = checkpointing and backend.wants_recomputation
        return training_memory(model, rows, length, backend.bf16, recompute, beside, backend.static_shapes, workers)

    phases = {
        "loading": loading_memory(model),
        "a validation": answer_memory(model, ROWS, row, backend.bf16, {"model before training": start // workers}),
    }
    if sft:
        phases["SFT"] = training(sft.batch_size, row, None)
    if grpo.steps:
        moments = {"moments": 8 * sum(p.numel() for p in model.parameters() if p.requires_grad) // workers}
        rows = grpo.batch_size * grpo.group
        phases["GRPO's answers"] = answer_memory(model, rows, row, backend.bf16, reference | moments)
        phases["GRPO"] = training(grpo.batch_size, together, reference)
    if anchor:
        phases["anchor"] = training(max(grpo.batch_size, sft.batch_size if sft else 0), anchor, reference)
    return phases


def describe(
    model: nn.Module, sft: Plan | None, grpo: GRPOPlan, prompt: int, anchor: int, checkpointing: bool,
    backend: TorchBackend, workers: int, shared: bool,
) -> None:  # fmt: skip
    """Print the plans, the memory (see `memory_of`) and what slows the device down. shared: whether the workers share
    the models out."""
    times = f" × {workers} workers" if workers > 1 else ""
    if sft:
        say(f"SFT: {sft.steps} updates of {sft.batch_size} conversations{times}")
    say(f"GRPO: {grpo.steps} updates of {grpo.batch_size} × {grpo.accumulation} prompts{times} × {grpo.group} answers")
    say(f"{prompt} + {grpo.length} tokens, {grpo.objective}, {grpo.sampling}")
    phases = memory_of(model, sft, grpo, prompt, anchor, checkpointing, backend, workers if shared else 1)
    say(memory_line(phases, backend))
    if backend.static_shapes and checkpointing:
        say("warning: gradient checkpointing is switched off on XLA; a lower --batch-size needs less memory")
    if backend.static_shapes and HUGEPAGES.is_file() and "[always]" not in HUGEPAGES.read_text(encoding="utf-8"):
        say("warning: transparent hugepages are off, which slows down the TPU runtime; run sudo ./enable_hugepages.sh")
