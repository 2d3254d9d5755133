"""One training step on the TPU's compiler: ours beside plain transformers' with cross-entropy over full logits.

    python benchmarks/tpu_step.py                              # Qwen3-0.6B's shapes, 4 × 1,024 tokens, v6e
    python benchmarks/tpu_step.py --layers 0 --steps plain,sft # the tied embedding and the LM head alone

Same model, batch, optimiser (ours) and bf16 autocast on both sides; a step is a graph with the forward and backward
pass, and one with the optimiser's step, as in a run with several micro-batches. QAT and recovery train what their
scripts train: not the embedding. Needs no TPU and no weights. A graph of 28 layers takes minutes and 14 GB of the
host's memory to compile; --layers limits it, and the difference between two values is the cost of a layer.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import transformers
from shapes import CONFIGS
from torch import Tensor, nn

from qat_lora.ahead.aot import CHIPS, Compiler
from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.hardware.speed import model_flops
from qat_lora.kd.training import kd_loss
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.lora.add import add_adapter
from qat_lora.models.attention import whole_rows
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run import options as opt
from qat_lora.run.command_line import run_script
from qat_lora.run.console import say
from qat_lora.run.options import ScriptConfig
from qat_lora.run.tpu import compiled, record, table
from qat_lora.train.losses import text_loss

STEPS = ("plain", "sft", "cached", "qat", "recovery")


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = opt.model("qwen3-0.6b", "shapes of a model in benchmarks/shapes.py")
    layers: int | None = opt.model(None, "decoder layers [all of the model's]", at_least=0)
    batch_size: int = opt.data(4, "rows", at_least=1)
    length: int = opt.data(1024, "tokens per row", at_least=2)
    targets: int = opt.data(192, "cached targets per position", at_least=1)
    steps: str = opt.run("plain,sft,recovery,qat", f"steps to compile, separated by commas: {', '.join(STEPS)}")
    chip: Literal[*CHIPS] = opt.device("v6e", "chip to compile for")


def main(cfg: Config) -> None:
    if unknown := set(cfg.steps.split(",")) - set(STEPS):
        raise UserError(
            f"--steps {', '.join(sorted(unknown))}: unknown; give some of {', '.join(STEPS)}, separated by commas"
        )
    if cfg.model not in CONFIGS:
        raise UserError(f"--model {cfg.model}: unknown; give one of {', '.join(CONFIGS)}")
    with whole_rows():  # for plain transformers; our own steps do so themselves
        backend = record(rehearse, dataclasses.replace(cfg, precision="bf16"), 1)
    chip = CHIPS[cfg.chip]
    with Compiler(cfg.chip) as compiler:
        phases = compiled(backend, compiler)
    say(table(phases, chip))
    seconds = {phase.name: phase.seconds(chip) for phase in phases if not phase.refused}
    for name, time in seconds.items():
        used = model_flops(trained_model(cfg, name), cfg.batch_size * cfg.length, cfg.length) / (
            chip.teraflops * 1e12 * time
        )
        ratio = f"{time / seconds['plain']:.2f}× plain's roofline, " if "plain" in seconds else ""
        say(f"{name}: {ratio}model FLOPs are {used:.0%} of the chip's peak in that time")


def rehearse(cfg: Config, backend: TorchBackend) -> dict:
    """Record one step of each kind."""
    rows = {"tokens": torch.zeros(cfg.batch_size, cfg.length, dtype=torch.long)}
    rows["mask"], rows["total"] = torch.ones_like(rows["tokens"], dtype=torch.uint8), torch.tensor(1.0)
    shape = cfg.batch_size, cfg.length, cfg.targets
    cached = {"index": torch.zeros(shape, dtype=torch.long), "prob": torch.zeros(shape)}
    for name in cfg.steps.split(","):
        trained, loss_of = backend.place(trained_model(cfg, name)), loss_function(name)
        optimizer = new_optimizer(trained, 1e-3, backend)
        with backend.phase(name, rows["tokens"].numel()):
            batch = backend.to_device(rows | (cached if loss_of is kd_loss else {}))
            with backend.autocast():
                loss = loss_of(trained, batch)
            backend.backward(loss)
            backend.step_boundary()
            backend.update(optimizer, 1.0)
        del trained, optimizer, loss
    return {}  # no estimate of memory


def trained_model(cfg: Config, step: str) -> nn.Module:
    """The model that a step trains, without storage."""
    kind, sizes = CONFIGS[cfg.model]
    sizes = sizes if cfg.layers is None else {**sizes, "num_hidden_layers": cfg.layers}
    config = getattr(transformers, kind)(**sizes, tie_word_embeddings=True, max_position_embeddings=cfg.length)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if step not in ("qat", "recovery"):
        return model
    student = quantize(model, StudentSpec(mlp="uniform4/r32", attn="uniform4/r32"))
    if step == "qat":
        return student
    for layer in quantized_layers(student.requires_grad_(False)).values():
        layer.quantizer.codes = torch.empty(layer.weight.shape, dtype=torch.uint8, device="meta")
    return add_adapter(student, 8, 8, ("auto",), 0)


def loss_function(step: str) -> Callable[[nn.Module, dict], Tensor]:
    def plain(model: nn.Module, batch: dict) -> Tensor:
        return model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss

    return {"plain": plain, "sft": text_loss}.get(step, kd_loss)


if __name__ == "__main__":
    run_script(main, Config, "tpu_step", __doc__)
