"""Recovery on models other than Llama: which layers get an adapter, and what the script prints about them."""

import pytest
import transformers
from records import curve
from small import SMALL

from qat_lora.errors import UserError
from qat_lora.lora.adapter import adapter_values, load_adapter
from qat_lora.lora.targets import coverage
from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, load_student, quantize, save_student

SIZE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def student_of(full_model_dir, tmp_path_factory):
    """student_of(config class, more): the best.pt of a tiny model at int4/tensor."""

    def make(kind, **more):
        config = getattr(transformers, f"{kind}Config")(**SIZE | more)
        folder = full_model_dir(transformers.AutoModelForCausalLM.from_config(config))
        spec = StudentSpec("int4/tensor", "int4/tensor")
        model = quantize(load_model(str(folder)), spec)
        initialise(model)
        freeze(model)
        path = tmp_path_factory.mktemp(kind) / "best.pt"
        save_student(path, model, str(folder), spec, {})
        return path

    return make


@pytest.fixture(scope="module")
def mixtral(student_of):
    return student_of("Mixtral", num_local_experts=4)


def flags(student, cache, folder, *more):
    return ["--checkpoint", student, "--kd-cache-dir", cache, "--output-dir", folder, *SMALL, *more]


def test_fused_projections_get_an_adapter_by_default(run, student_of, sharp_cache, tmp_path, capsys):
    student = student_of("Phi3")
    run("train_recovery_lora", *flags(student, sharp_cache, tmp_path / "run", "--adapter-init", "error"))
    said = capsys.readouterr().out
    assert "adapter: 8 layers (o_proj, qkv_proj, gate_up_proj, down_proj in each of 2 blocks), " in said
    assert "experts" not in said
    loaded = load_adapter(load_student(student)[0], tmp_path / "run" / "adapter", student)
    assert coverage(loaded).startswith("8 layers") and f", {adapter_values(loaded)} values" in said


def test_experts_get_an_adapter_only_on_request(run, mixtral, sharp_cache, tmp_path, capsys):
    run("train_recovery_lora", *flags(mixtral, sharp_cache, tmp_path / "run", "--dry-run"))
    said = capsys.readouterr().out
    assert "adapter: 6 layers (q_proj, v_proj, o_proj in each of 2 blocks), " in said
    assert "experts are left as they are; --targets auto,experts adapts them too" in said

    more = ["--targets", "auto, experts", "--adapter-init", "error", "--recovery-r", "4"]
    run("train_recovery_lora", *flags(mixtral, sharp_cache, tmp_path / "run", *more, "--learning-rate", "1e-3"))
    said = capsys.readouterr().out
    assert "q_proj, v_proj, o_proj, experts.down_proj, experts.gate_up_proj in each of 2 blocks" in said
    assert "left as they are" not in said
    loaded = load_adapter(load_student(mixtral)[0], tmp_path / "run" / "adapter", mixtral)
    assert adapter_values(loaded) == 2 * 4 * (128 + 96 + 128 + 4 * (128 + 192))
    kl = curve(tmp_path / "run", "heldout_kl")
    assert min(kl) < kl[0]


def test_a_target_that_the_model_lacks_is_refused_and_leaves_no_run(run, mixtral, sharp_cache, tmp_path):
    for more in (["--mlp-only"], ["--targets", "q,gate_up_proj"]):
        with pytest.raises(UserError, match=r"choose from q,k,v,o,attn,all,experts$"):
            run("train_recovery_lora", *flags(mixtral, sharp_cache, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()
