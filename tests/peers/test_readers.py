"""Do the formats' own libraries see our weights in a folder of packed codes?

A random tiny Llama, so that every parameter has an effect, read in fp32 by transformers with compressed-tensors or
auto-round, and by mlx-lm. Its embedding is written in fp16, so ours is rounded to fp16, too. auto-round computes in
half precision on a CPU. GPTQ's folders hold the same bytes as AutoRound's.
"""

import itertools
import runpy
from pathlib import Path

import pytest
import torch
from students import student_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qat_lora.errors import ROOT
from qat_lora.export import compressed_tensors, mlx
from qat_lora.export.gptq import AUTOROUND
from qat_lora.export.packed import plan_packed, write_packed
from qat_lora.export.source import load_source
from qat_lora.quant.student import StudentSpec, save_student

pytestmark = pytest.mark.peer
CT, MLX = compressed_tensors.LAYOUT, mlx.LAYOUT
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 520, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = {"llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "qwen3": {"head_dim": 64}}
HOLDS = {
    CT: ["int2/g64", "int3/g32", "int4/g32", "int8/g32", "ternary/g64", "balanced4/g32", "int2/g32/s8", "int4/tensor"],
    AUTOROUND: ["int2/g64", "int4/g32", "int8/g128"],
    MLX: ["int2/g64", "int2/g64+offset", "int4/g32+offset", "ternary/g64", "balanced4/g32", "int6/g64", "int8/rows8"],
}
TOKENS = torch.arange(3, 67).view(1, 64)
READERS = runpy.run_path(str(ROOT / "benchmarks" / "served.py"))


@pytest.fixture(scope="module")
def folder(full_model_dir):
    """folder(kind): a random tiny model."""

    def make(kind):
        config = AutoConfig.for_model(kind, **SHAPE, **KINDS[kind], tie_word_embeddings=True)
        return full_model_dir(AutoModelForCausalLM.from_config(config))

    return make


def logits_of(layout, folder):
    library = {MLX: "mlx_lm", CT: "compressed_tensors", AUTOROUND: "auto_round"}[layout]
    pytest.importorskip(library, reason="make setup-peers installs it")
    reader = READERS["in_mlx" if layout is MLX else "in_transformers"](folder)
    return reader(TOKENS[0].tolist())


def test_the_models_that_mlx_lm_has():
    folder = Path(pytest.importorskip("mlx_lm", reason="make setup-peers").__file__).with_name("models")
    from mlx_lm.utils import MODEL_REMAPPING

    theirs = {file.stem for file in folder.glob("*.py")} | MODEL_REMAPPING.keys()
    assert MLX.kinds[0] == theirs & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout, text",
    [pair for layout, texts in HOLDS.items() for pair in itertools.product([layout], texts)],
    ids=lambda part: getattr(part, "name", part),
)
def test_logits_in_its_own_library(folder, tmp_path, layout, text, kind):
    spec, name = StudentSpec(mlp=text, attn=text), str(folder(kind))
    save_student(tmp_path / "best.pt", student_of(name, spec), name, spec, {})
    source = load_source(tmp_path / "best.pt")
    plan, target = plan_packed(source, layout), tmp_path / "out"
    target.mkdir()
    write_packed(source, plan, target, target)
    student, table = source.student.eval(), source.student.get_input_embeddings().weight
    table.data.copy_(table.half().float())
    with torch.no_grad():
        ours = student(TOKENS).logits[0]
    far = ((logits_of(layout, target) - ours).square().mean().sqrt() / ours.std()).item()
    print(f"\n{layout.name} {kind} {text}: {far:.2g}", flush=True)
    assert far < (2e-2 if layout is AUTOROUND else 1e-4)
