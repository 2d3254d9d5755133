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
from qat_lora.export.gptq import AUTOROUND, AWQ
from qat_lora.export.packed import plan_packed, write_packed
from qat_lora.export.source import load_source
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.spec import QuantSpec
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


@pytest.mark.parametrize("layout, text", [(CT, "int4/g32+zero"), (CT, "int2/g64+zero"), (AWQ, "int4/g128+zero")])
def test_zero_points_as_their_libraries_unpack_them(folder, layout, text):
    """transformers 5.23 does not load them from compressed-tensors folders, nor auto-round on a CPU from AWQ's."""
    name, spec = str(folder("llama")), QuantSpec.parse(text)
    student = student_of(name, StudentSpec(mlp=text, attn=text))
    layer = quantized_layers(student)["model.layers.1.mlp.up_proj"]
    layer.quantizer.codes = layer.quantizer.encode(layer.weight)
    held, shape = layout.tensors(layer.quantizer.parts(), spec), layer.weight.shape
    if layout is AWQ:
        helpers = pytest.importorskip("auto_round.export.export_to_awq.utils", reason="make setup-peers installs it")
        found = helpers.dequantize_gemm(held["qweight"], held["qzeros"], held["scales"], 4, 128).T
    else:
        helpers = pytest.importorskip(
            "compressed_tensors.compressors.pack_quantized.helpers", reason="make setup-peers"
        )
        scale = held["weight_scale"].float()
        codes = helpers.unpack_from_int32(held["weight_packed"], spec.bits, shape).float()
        zeros = helpers.unpack_from_int32(held["weight_zero_point"], spec.bits, scale.shape, packed_dim=0).float()
        found = (codes - zeros.repeat_interleave(spec.size, 1)) * scale.repeat_interleave(spec.size, 1)
    wanted = layer.quantizer.decode(layer.quantizer.codes)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-3 if layout is AWQ else 0, atol=0)  # AWQ's is in fp16
