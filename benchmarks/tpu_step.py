"""One training step on the TPU's compiler: ours beside plain transformers' with cross-entropy over full logits.

    python benchmarks/tpu_step.py                               # Qwen3-0.6B's shapes, 4 × 1,024 tokens, v6e
    python benchmarks/tpu_step.py --layers 0 --steps plain,sft  # the embedding and the LM head alone
    python benchmarks/tpu_step.py --layers 3 --steps body       # without the LM head: layers 3 minus 1, halved

Same model, batch, optimiser (ours) and bf16 autocast on both sides; a step is forward, backward and update. QAT and
recovery train what their scripts train: not the embedding. Needs no TPU and no weights. A whole model takes 10 minutes
and up to 20 GB of memory for each step; --layers 1 takes a few.
"""

import os
from dataclasses import dataclass
from typing import Literal

from qat_lora.backend.aot import CHIPS
from qat_lora.run import options as opt
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig

STEPS = ("plain", "body", "sft", "cached", "qat", "recovery")


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = opt.model("qwen3-0.6b", "shapes of a model in benchmarks/shapes.py")
    layers: int | None = opt.model(None, "decoder layers [all of the model's]", at_least=0)
    batch_size: int = opt.data(4, "rows", at_least=1)
    length: int = opt.data(1024, "tokens per row", at_least=2)
    targets: int = opt.data(192, "cached targets per position", at_least=1)
    steps: str = opt.run("plain,sft,qat,recovery", f"which steps to compile, of {', '.join(STEPS)}")
    chip: Literal[*CHIPS] = opt.device("v6e", "chip to compile for")


def main(cfg: Config) -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch
    import transformers
    from shapes import CONFIGS
    from torch import nn

    from qat_lora.backend.aot import Compiled, Compiler
    from qat_lora.backend.recording import RecordingBackend
    from qat_lora.errors import UserError
    from qat_lora.kd.training import kd_loss
    from qat_lora.lora.add import add_adapter
    from qat_lora.models.architecture import hidden_states
    from qat_lora.quant.linear import quantized_layers
    from qat_lora.quant.student import StudentSpec, quantize
    from qat_lora.quant.training import parameter_groups
    from qat_lora.run.console import say
    from qat_lora.train.losses import text_loss
    from qat_lora.train.optimizer import new_optimizer

    if unknown := set(cfg.steps.split(",")) - set(STEPS):
        raise UserError(f"--steps {', '.join(unknown)}: unknown; give some of {', '.join(STEPS)}, separated by commas")
    if cfg.model not in CONFIGS:
        raise UserError(f"--model {cfg.model}: unknown; give one of {', '.join(CONFIGS)}")
    backend, chip = RecordingBackend("bf16"), CHIPS[cfg.chip]

    def model() -> nn.Module:
        kind, sizes = CONFIGS[cfg.model]
        sizes = sizes if cfg.layers is None else {**sizes, "num_hidden_layers": cfg.layers}
        config = getattr(transformers, kind)(**sizes, tie_word_embeddings=True, max_position_embeddings=cfg.length)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def student() -> nn.Module:
        return quantize(model(), StudentSpec(mlp="uniform4/g32", attn="uniform4/g32"))

    def recovering() -> nn.Module:
        frozen = student().requires_grad_(False)
        for layer in quantized_layers(frozen).values():
            layer.quantizer.codes = torch.empty(layer.weight.shape, dtype=torch.uint8, device="meta")
        return add_adapter(frozen, 8, 8, ("auto",), 0)

    # transformers looks for packed rows in the middle of the step, which the host would have to wait for
    transformers.masking_utils.find_packed_sequence_indices = lambda positions: None

    def plain(m, batch):
        return m(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss

    def body(m, batch):
        return hidden_states(m, batch["tokens"]).float().square().mean()

    kinds = {
        "plain": (model, plain), "body": (model, body), "sft": (model, text_loss), "cached": (model, kd_loss),
        "qat": (student, kd_loss), "recovery": (recovering, kd_loss),
    }  # fmt: skip
    shape = cfg.batch_size, cfg.length
    rows = {"tokens": torch.zeros(shape, dtype=torch.long), "mask": torch.ones(shape, dtype=torch.uint8)}
    cached = {"index": torch.zeros(*shape, cfg.targets, dtype=torch.long), "prob": torch.zeros(*shape, cfg.targets)}
    with Compiler(cfg.chip) as compiler:
        for name in cfg.steps.split(","):
            make, loss_of = kinds[name]
            trained = backend.place(make())
            optimizer = new_optimizer(parameter_groups(trained, 1e-3, 1e-3), backend)
            with backend.phase(name):
                batch = backend.to_device(rows | {"total": torch.tensor(1.0)} | (cached if loss_of is kd_loss else {}))
                with backend.autocast():
                    loss = loss_of(trained, batch)
                backend.backward(loss)
                backend.update(optimizer, 1.0)
            (found,) = compiler.compile(backend.graphs[name])
            del trained, optimizer, loss
            if not isinstance(found, Compiled):
                say(f"{name:9} {found}")
                continue
            say(
                f"{name:9} peak {found.peak / 1e9:6.2f} GB  temporary {found.temporary / 1e9:6.2f} GB  "
                f"{found.flops / 1e12:7.3f} TFLOP  moved {found.moved / 1e9:7.2f} GB  "
                f"accessed {found.accessed / 1e9:7.2f} GB  "
                f"roofline {found.roofline(chip) * 1e3:7.2f} ms  compiled in {found.seconds:.0f} s"
            )


if __name__ == "__main__":
    run_script(main, Config, "tpu_step", __doc__)
