"""Do we read the low-bit models that other tools make, as a student's start (--init own), and write them back?

llama.cpp's own quantiser and AutoRound quantise a random tiny Llama. transformers dequantises the first with the gguf
library; auto-round itself reads the second, in half precision.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.export import compressed_tensors
from qat_lora.export.gguf import MODEL_FILE, plan_gguf, write_gguf
from qat_lora.export.gptq import AUTOROUND, AWQ, GPTQ
from qat_lora.export.own import own_spec, own_student
from qat_lora.export.packed import FILE, plan_packed, write_packed
from qat_lora.export.source import Source, load_source
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.quant.linear import freeze

pytestmark = pytest.mark.peer
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = torch.arange(3, 67).view(1, 64)


@pytest.fixture(scope="module")
def llama(full_model_dir, tiny_tokenizer):
    config = AutoConfig.for_model("llama", **SHAPE, vocab_size=len(tiny_tokenizer))
    return str(full_model_dir(AutoModelForCausalLM.from_config(config)))


def own(path: Path | str) -> Source:
    """The frozen student of a low-bit model, for an export; its logits are those of the model."""
    spec = own_spec(str(path))
    student = own_student(str(path), spec)
    freeze(student)
    with torch.no_grad():
        torch.testing.assert_close(student(TOKENS).logits, load_model(str(path))(TOKENS).logits, rtol=1e-4, atol=1e-4)
    return Source(None, student, {"model": str(path), "spec": dict(vars(spec)), "info": {}})


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_gguf_of_llama_cpps_own_quantiser(llama, load_script, tmp_path, kind):
    pytest.importorskip("llama_cpp", reason="make setup-peers builds it")
    source = load_source(None, None, llama)
    write_gguf(source, plan_gguf(source), tmp_path, tmp_path)
    load_script("qat_quality").quantise_gguf(llama, tmp_path / MODEL_FILE, tmp_path / f"{kind}.gguf", kind, {})
    student = own(tmp_path / f"{kind}.gguf")
    plan = plan_gguf(student)
    assert {entry.kind for entry in plan.entries} == {kind, "F16", "F32"}
    (tmp_path / "back").mkdir()
    write_gguf(student, plan, tmp_path / "back", tmp_path / "back")
    ours, theirs = (load_model(str(path)) for path in (tmp_path / "back" / MODEL_FILE, tmp_path / f"{kind}.gguf"))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(mine, other), name


FORMS = [
    ("auto_gptq", GPTQ, True), ("auto_round:auto_gptq", AUTOROUND, True), ("auto_gptq", GPTQ, False),
    ("auto_awq", AWQ, False), ("llm_compressor", compressed_tensors.LAYOUT, True),
    ("llm_compressor", compressed_tensors.LAYOUT, False),
]  # fmt: skip


@pytest.mark.parametrize("form, layout, sym", FORMS)
def test_a_folder_of_autoround(llama, tmp_path, form, layout, sym):
    package = pytest.importorskip("auto_round", reason="make setup-peers installs it")
    model, rows = load_model(llama), torch.randint(3, 500, (8, 64), generator=torch.Generator().manual_seed(0))
    model.name_or_path = model.config._name_or_path = llama
    trained = package.AutoRound(
        model, load_tokenizer(llama), dataset=[rows], nsamples=8, seqlen=64, iters=1, batch_size=8, device_map="cpu",
        scheme={"bits": 4, "group_size": 64, "sym": sym, "data_type": "int"}, enable_torch_compile=False, amp=False,
    )  # fmt: skip
    trained.quantize_and_save(str(tmp_path / "made"), format=form)
    (made,) = (path.parent for path in (tmp_path / "made").rglob("config.json"))
    student = own(made)
    assert student.made["spec"]["mlp"] == ("int4/g64" if sym else "int4/g64+zero")
    (tmp_path / "back").mkdir()
    write_packed(student, plan_packed(student, layout), tmp_path / "back", tmp_path / "back")
    before, after = load_file(made / FILE), load_file(tmp_path / "back" / FILE)
    for name in before.keys() & after.keys():
        if name.endswith(("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "zero_point")):
            assert torch.equal(before[name], after[name]), name
