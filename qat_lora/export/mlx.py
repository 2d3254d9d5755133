"""MLX folders, for mlx-lm on Macs.

A layer is weight uint32 [out, in·bits/32], scales and biases [out, groups]; a weight is scale·q + bias with q from 0.
So a trained offset costs nothing here. The adapter is in mlx-lm's own form.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.export.packed import Layout, words
from qat_lora.export.source import Source
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.packed import PACKINGS
from qat_lora.quant.linear import StoredWeight, each
from qat_lora.quant.spec import QuantSpec
from qat_lora.run.files import write_json

GROUPS = (128, 64, 32)
# Of the language models in transformers, those that mlx-lm 0.32.2 has (tests/peers/test_readers.py compares).
KINDS = """
    afmoe apertus bailing_hybrid bitnet cohere cohere2 dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n gemma4
    gemma4_text gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid helium hunyuan_v1_dense internlm3 iquestcoder jamba kimi_linear laguna lfm2
    lfm2_moe llama llama4 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2
    ministral3 mistral mixtral nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open stablelm
    starcoder2
"""


def _group(spec: QuantSpec, columns: int) -> int:
    """The largest group of MLX's that divides the quantiser's; 0 if none does."""
    size = spec.size if spec.scale == "group" else columns
    return next((group for group in GROUPS if size % group == 0), 0)


def _misfit(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    if spec.codebook == "uniform" or spec.scale == "lowrank":
        return "it has integer levels with one scale a group"
    if spec.bits == 7:
        return "it has 2, 3, 4, 5, 6 or 8 bits"
    return None if _group(spec, shape[1]) else "its groups are of 32, 64 or 128"


def _tensors(parts: StoredWeight, spec: QuantSpec) -> dict[str, Tensor]:
    groups = parts.codes.shape[1] // _group(spec, parts.codes.shape[1])
    scale = each(parts.scale, groups)
    bias = scale * np.float32(spec.lowest) if parts.offset is None else each(parts.offset, groups)
    rounds = spec.narrow or spec.zero or spec.codebook == "balanced"  # products that fp16 does not hold
    kind = np.float32 if rounds else np.float16
    return {
        "weight": words(parts.codes, spec.bits).view(torch.uint32),
        "scales": torch.from_numpy(scale.astype(kind)),
        "biases": torch.from_numpy(bias.astype(kind)),
    }


def _integers(spec: QuantSpec) -> tuple[int, int]:
    return 1, 0


def _config(kinds: dict[str, QuantSpec], student: nn.Module) -> dict:
    found = {}
    for name, spec in kinds.items():
        columns = student.get_submodule(name).weight.shape[1]
        found[name] = {"group_size": _group(spec, columns), "bits": spec.bits}
    return {"quantization": {**max(found.values(), key=list(found.values()).count), **found}}


def _adapter(source: Source, folder: Path, shown: Path) -> None:
    names = {id(module): name for name, module in source.student.named_modules()}
    blocks = [f"{names[id(block)]}." for block in decoder_layers(source.student)]
    keys = sorted({name.removeprefix(block) for name in source.loras for block in blocks if name.startswith(block)})
    factors = {lora.factor for lora in source.loras.values()}
    ranks = {len(lora.a) for lora in source.loras.values()}
    alike = len(source.loras) == len(keys) * len(blocks) == len(source.updates)
    if not alike or len(factors) > 1 or len(ranks) > 1:
        raise UserError(
            f"--format mlx: adapter {source.adapter} differs from block to block, or changes weights other than linear "
            "layers; use --format hf or merged"
        )
    folder.mkdir()
    tensors = {
        f"{n}.lora_{part}": getattr(lora, part).T.contiguous() for n, lora in source.loras.items() for part in "ab"
    }
    save_file(tensors, folder / "adapters.safetensors")
    shape = {"rank": ranks.pop(), "scale": factors.pop(), "dropout": 0.0, "keys": keys}
    write_json(
        folder / "adapter_config.json", {"fine_tune_type": "lora", "num_layers": len(blocks), "lora_parameters": shape}
    )


LAYOUT = Layout(
    "mlx", _misfit, _tensors, _integers, PACKINGS["quantization"], _config, _adapter, tables=True,
    kinds=(frozenset(KINDS.split()), "mlx-lm 0.32.2"),
)  # fmt: skip
