"""Folders of packed codes: what is read back is the student, and what a format cannot hold is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from students import student_of
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.errors import UserError
from qat_lora.export import compressed_tensors, mlx
from qat_lora.export.gptq import AUTOROUND, AWQ, GPTQ
from qat_lora.export.packed import FILE, check_packed, plan_packed, write_packed
from qat_lora.export.source import load_source
from qat_lora.export.targets import every_format
from qat_lora.models.packed import unpacked
from qat_lora.quant.student import StudentSpec, save_student

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 520, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CT, MLX = compressed_tensors.LAYOUT, mlx.LAYOUT
HOLDS = {
    CT: ["int2/g64", "int4/g32", "int8/g32", "int5/g64", "ternary/g64", "balanced2/g32", "balanced4/g32", "int2/g32/s8",
         "int4/tensor", "int4/g128+zero", "int8/g32+zero"],
    GPTQ: ["int2/g64", "int3/g32", "int4/g32", "int8/g128", "ternary/g64", "int4/g128+zero", "int2/g64+zero"],
    AUTOROUND: ["int2/g64", "int4/g128", "int8/g32+zero"],
    AWQ: ["int4/g128+zero", "int4/g64"],
    MLX: ["int2/g64", "int2/g64+offset", "int3/g32+offset", "ternary/g256", "balanced2/g32", "balanced4/g64",
          "int6/g32", "int2/g32+offset/s8", "int4/rows8", "int8/tensor", "int4/g64+zero"],
}  # fmt: skip
PAIRS = [(layout, text) for layout, texts in HOLDS.items() for text in texts]


@pytest.fixture(scope="module")
def folder(full_model_dir):
    config = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True)
    return full_model_dir(AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="module")
def source(folder):
    """source(spec): the student of a tiny Llama."""

    def make(text, **parts):
        spec = StudentSpec(**{"mlp": text, "attn": text, **parts})
        path = folder / f"{abs(hash(spec))}.pt"
        if not path.exists():
            save_student(path, student_of(folder, spec), str(folder), spec, {"step": 3})
        return load_source(path)

    return make


@pytest.mark.parametrize("layout, text", PAIRS, ids=lambda part: getattr(part, "name", part))
def test_it_is_read_back_code_by_code_and_has_the_computed_size(source, tmp_path, layout, text):
    made = source(text)
    plan = plan_packed(made, layout)
    write_packed(made, plan, tmp_path, tmp_path)
    real = (tmp_path / FILE).stat().st_size
    assert abs(real - plan.bytes()) < 0.01 * real
    packed, _ = unpacked(str(tmp_path))
    assert packed.keys() == plan.layers.keys()
    for name, quantizer in plan.layers.items():
        torch.testing.assert_close(packed[name].value(), quantizer.decode(quantizer.codes), rtol=3e-7, atol=1e-9)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization" if layout is MLX else "quantization_config") in config
    assert (tmp_path / "tokenizer.json").exists() and (tmp_path / "generation_config.json").exists()


@pytest.mark.parametrize("layout", HOLDS, ids=lambda layout: layout.name)
def test_a_changed_word_scale_or_norm_is_noticed(source, tmp_path, layout):
    made = source("int4/g64" if layout is not AUTOROUND else "int4/g128")
    plan = plan_packed(made, layout)
    write_packed(made, plan, tmp_path, tmp_path)
    whole = load_file(tmp_path / FILE)
    for part in ("q_proj." + next(iter(plan.tensors(next(iter(plan.layers.values()))))), "scale", "layernorm.weight"):
        name = next(name for name in whole if part in name)
        changed = dict(whole) | {name: whole[name].clone()}
        changed[name].view(-1)[:1].view(torch.uint8)[0] ^= 4
        save_file(changed, tmp_path / FILE)
        with pytest.raises(UserError, match="changed between writing and reading back"):
            check_packed(plan, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "layout, text, parts, said",
    [
        (CT, "int2/g64+offset", {}, "its offsets are whole levels"), (CT, "uniform4/r8", {}, "integer levels"),
        (CT, "balanced8/g32", {}, "at most 8 bits"), (CT, "int4/rows8", {}, "one scale a group or row"),
        (CT, "int4/g32", {"head": "int8/g32"}, "tied to the embedding"),
        (GPTQ, "int4/g32+offset", {}, "integer levels"), (AWQ, "int2/g64+zero", {}, "it has 4 bits"),
        (GPTQ, "balanced4/g32", {}, "integer levels"), (GPTQ, "int5/g32", {}, "2, 3, 4 or 8 bits"),
        (GPTQ, "int2/g32/s8", {}, "its scales are fp16"), (GPTQ, "int4/g32", {"attn": "int8/g32"}, "one quantiser"),
        (AUTOROUND, "int4/g32", {"mlp": "none"}, "one quantiser"), (MLX, "int7/g32", {}, "2, 3, 4, 5, 6 or 8"),
        (MLX, "int4/g16", {}, "32, 64 or 128"), (MLX, "uniform4/g32", {}, "integer levels"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused_by_name(source, layout, text, parts, said):
    with pytest.raises(UserError, match=said) as error:
        plan_packed(source(text, **parts), layout)
    assert str(error.value).startswith(layout.name) and re.search(
        r"\buse (hf|mlx|compressed-tensors)\b", str(error.value)
    )


def test_mlx_packs_the_embedding_that_a_quantised_head_is_tied_to(source, tmp_path):
    made = source("int4/g32", head="int8/g64")
    plan = plan_packed(made, MLX)
    write_packed(made, plan, tmp_path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert config["model.embed_tokens"] == {"group_size": 64, "bits": 8} and config["bits"] == 4


def test_a_dry_run_says_what_every_format_holds(source):
    said = dict(line.split(": ", 1) for line in every_format(source("int2/g64+offset")))
    assert said.keys() == {"hf", "gguf", "compressed-tensors", "gptq", "autoround", "awq", "mlx"}
    assert "2.500 bits" in said["mlx"] and "5.000 bits" in said["gguf"]
    assert all(said[name].startswith("no: ") for name in ("compressed-tensors", "gptq", "autoround", "awq"))
