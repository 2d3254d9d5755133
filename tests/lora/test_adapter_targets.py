"""Adapter targets: found by structure, checked block by block and reported; adapters on experts in PEFT's own way."""

import copy
import functools

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import ParamWrapper
from students import student_of

from qat_lora.errors import UserError
from qat_lora.lora.adapter import Dropout, adapter_values, load_adapter, save_adapter
from qat_lora.lora.add import add_adapter, fit_to_error
from qat_lora.lora.targets import PROJECTIONS, adapted, choose, coverage, left_out
from qat_lora.models.architecture import decoder_layers, eager_experts, hidden_states, matrices, unwrap
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec

SIZE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
MORE = {
    "Mixtral": EXPERTS, "Qwen3Moe": EXPERTS, "GptOss": EXPERTS,
    "Qwen3Next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32, "num_hidden_layers": 4},
    "Qwen3_5Text": LINEAR | {"num_hidden_layers": 4, "intermediate_size": 64},
    "DeepseekV2": {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
    "Jamba": EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}  # fmt: skip
TOKENS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def tiny(name: str, **more):
    """A random model of a config class, by its name without "Config"."""
    return copy.deepcopy(built(name, **more))


@functools.cache
def built(name: str, **more):
    kind = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    options = {k: v for k, v in (SIZE | MORE.get(name, {}) | more).items() if k in known}
    model = transformers.AutoModelForCausalLM.from_config(kind(**options), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_().mul_(0.1)
    return model.requires_grad_(False)


def frozen(model, *spec: str):
    """A copy of the model as a student, whose codes are fixed."""
    student = student_of(copy.deepcopy(model), StudentSpec(*spec or ["int4/tensor"] * 2))
    freeze(student)
    return student.requires_grad_(False)


def filled(model):
    """Fill B with random numbers, so that the adapter has an effect."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    return model


def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


# -- which layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_auto_on_seven_projections_equals_older_versions(kind):
    """Names, values and config equal those of the adapter that older versions made for q,v,o,gate,up,down."""
    names = [f"{name}_proj" for name in ("q", "v", "o", "gate", "up", "down")]
    base = tiny(kind)
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    old = get_peft_model(copy.deepcopy(base), config)
    model = add_adapter(base, 4, 8, ("auto",), 3)
    config = model.peft_config["default"]
    assert config.to_dict() | {"target_parameters": None} == old.peft_config["default"].to_dict()
    wanted, found = ({n: p for n, p in m.named_parameters() if "lora_" in n} for m in (old, model))
    assert list(wanted) == list(found) and all(torch.equal(p, found[name]) for name, p in wanted.items())
    assert coverage(model) == f"12 layers ({', '.join(names)} in each of 2 blocks)"


AUTO = {
    "Phi3": "8 layers (o_proj, qkv_proj, gate_up_proj, down_proj in each of 2 blocks)",
    "GPTNeoX": "8 layers (query_key_value, dense, dense_h_to_4h, dense_4h_to_h in each of 2 blocks)",
    "OPT": "10 layers (v_proj, q_proj, out_proj, fc1, fc2 in each of 2 blocks)",
    "Mamba": "2 layers (in_proj in each of 2 blocks)",
    "DeepseekV2": "16 layers (q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj "
    "in each of 2 blocks)",
    "Qwen3_5Text": "30 layers (out_proj, in_proj_qkv, in_proj_z, in_proj_b, in_proj_a in 3 of 4 blocks; gate_proj, "
    "up_proj, down_proj in each of 4 blocks; q_proj, v_proj, o_proj in 1 of 4 blocks)",
}
# found alike, so their values, gradients and files are not checked again
SIMILAR = {
    "Glm": "10 layers (q_proj, v_proj, o_proj, gate_up_proj, down_proj in each of 2 blocks)",
    "Falcon": AUTO["GPTNeoX"],
    "Bloom": AUTO["GPTNeoX"],
    "GPTJ": "10 layers (v_proj, q_proj, out_proj, fc_in, fc_out in each of 2 blocks)",
    "Mpt": "8 layers (Wqkv, out_proj, up_proj, down_proj in each of 2 blocks)",
    "Mixtral": "6 layers (q_proj, v_proj, o_proj in each of 2 blocks)",
    "Qwen3Next": "24 layers (in_proj_qkvz, in_proj_ba, out_proj in 3 of 4 blocks; gate_proj, up_proj, down_proj in "
    "each of 4 blocks; q_proj, v_proj, o_proj in 1 of 4 blocks)",
}


@pytest.mark.parametrize("kind", AUTO)
def test_auto_is_every_linear_layer_except_a_separate_k(kind, tmp_path):
    """They are reported, each gets a gradient, and the file gives the same numbers here, merged, and in plain PEFT."""
    model = tiny(kind)
    plain, base = logits(model), copy.deepcopy(model)
    model = add_adapter(model, 4, 8, ("auto",), 0, dropout=0.1)
    assert coverage(model) == AUTO[kind]
    torch.testing.assert_close(logits(model), plain, rtol=1e-5, atol=1e-5)
    check_gradients(model)
    check_file(model.eval(), base, tmp_path)


def check_gradients(model):
    """The adapter and nothing else gets them."""
    logits(filled(model).train()).square().sum().backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())


@torch.no_grad()
def check_file(model, base, folder):
    save_adapter(model, folder / "adapter", None)
    wanted = logits(model)
    assert (wanted - logits(base)).abs().max() > 1e-2
    close = {"rtol": 1e-5, "atol": 1e-5}
    elsewhere = PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapter")
    torch.testing.assert_close(logits(elsewhere), wanted, **close)
    loaded = load_adapter(copy.deepcopy(base), folder / "adapter")
    torch.testing.assert_close(logits(loaded), wanted, **close)
    assert coverage(loaded) == coverage(model) and adapter_values(loaded) == adapter_values(model)
    with eager_experts(loaded):
        exact = logits(loaded.double())
        torch.testing.assert_close(logits(loaded.merge_and_unload()), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "kind, targets, wanted",
    [
        ("Phi3", ("qkv_proj", "down"), "4 layers (qkv_proj, down_proj in each of 2 blocks)"),
        ("Phi3", ("attn",), "4 layers (o_proj, qkv_proj in each of 2 blocks)"),
        ("Phi3", ("mlp",), "4 layers (gate_up_proj, down_proj in each of 2 blocks)"),
        ("GPTNeoX", ("mlp.dense_4h_to_h",), "2 layers (dense_4h_to_h in each of 2 blocks)"),
        ("Llama", ("all",), f"14 layers ({', '.join(f'{name}_proj' for name in PROJECTIONS)} in each of 2 blocks)"),
        *((kind, ("auto",), wanted) for kind, wanted in SIMILAR.items()),
        ("Llama", ("mlp", "k"), "8 layers (k_proj, gate_proj, up_proj, down_proj in each of 2 blocks)"),
        ("Mixtral", ("k", "experts"), "6 layers (k_proj, experts.down_proj, experts.gate_up_proj in each of 2 blocks)"),
        ("Qwen3Next", ("q", "out_proj"), "4 layers (out_proj in 3 of 4 blocks; q_proj in 1 of 4 blocks)"),
        ("Jamba", ("mlp",), "3 layers (gate_proj, up_proj, down_proj in 1 of 2 blocks)"),
    ],
)
def test_names_and_groups(kind, targets, wanted):
    assert coverage(add_adapter(tiny(kind), 2, 2, targets, 0)) == wanted


@pytest.mark.parametrize(
    "kind, targets, reason",
    [
        ("Phi3", "q,v,o", "'q' matches nothing; choose from o,qkv_proj,gate_up_proj,down,attn,mlp,all"),
        ("Mixtral", "q,down", "'down' matches nothing; choose from q,k,v,o,attn,all,experts"),
        ("Mixtral", "mlp.gate", "'mlp.gate' matches nothing"),  # the router
        ("Qwen3Next", "q,v,o", "'q' matches 1 of 4 blocks and leaves 3 others without an adapter on that part; add "
         "a target for them: in_proj_qkvz,in_proj_ba,out_proj (3 of 4 blocks), gate,up,down (4 of 4 blocks), q,k,v,o "
         "(1 of 4 blocks), attn,mlp,all,experts"),
        ("Qwen3Next", "auto,experts,in_proj", "'in_proj' matches nothing"),
        ("Jamba", "gate,up,down", "'gate' matches 1 of 2 blocks"),
        ("Mamba", "dt_proj", "'dt_proj' matches nothing; choose from in_proj,attn,all"),
        ("GPT2", "auto", "blocks hold no plain linear layers that could have an adapter; use another"),
    ],
)  # fmt: skip
def test_a_missing_target_is_refused_with_the_possible_ones(kind, targets, reason):
    with pytest.raises(UserError) as refused:
        choose(tiny(kind), targets.split(","))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_weight_that_blocks_share_is_refused():
    model = tiny("Llama")
    for name in ("q_proj", "o_proj"):
        first, second = (getattr(block.self_attn, name) for block in decoder_layers(model))
        second.weight = first.weight
    with pytest.raises(UserError, match="share the weights of o_proj, q_proj"):
        choose(model, ["auto"])
    assert choose(model, ["v"])[0] == [f"model.layers.{at}.self_attn.v_proj" for at in range(2)]


def test_layers_without_an_adapter_are_reported():
    assert left_out(add_adapter(tiny("Llama"), 2, 2, ("q",), 0)) == []
    mixtral = add_adapter(tiny("Mixtral"), 2, 2, ("auto",), 0)
    assert left_out(mixtral, "; like this") == ["experts are left as they are; like this"]
    assert left_out(add_adapter(tiny("Mixtral"), 2, 2, ("auto", "experts"), 0)) == []
    (line,) = left_out(add_adapter(frozen(tiny("Mamba")), 2, 2, ("auto",), 0))
    assert line.startswith("x_proj, dt_proj, out_proj cannot have an adapter")


def test_a_shared_expert_is_not_a_router():
    """Even if its width equals the number of experts, as in Qwen3-Next-80B."""
    block = decoder_layers(tiny("Qwen3Next", num_experts=32))[0]
    names = {matrix.path for matrix in matrices(block)}
    assert {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} < names
    assert not names & {"mlp.gate", "mlp.shared_expert_gate"}


# -- experts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, spec",
    [
        ("Mixtral", None), ("Mixtral", "lut4/r4"), ("Qwen3Moe", "int4/tensor"), ("GptOss", None),
        ("GptOss", "balanced2/g32"), ("Qwen3Next", "balanced2/g32"),
    ],
)  # fmt: skip
def test_experts_are_adapted_plain_or_quantised(kind, spec, tmp_path):
    model = tiny(kind)
    model = frozen(model, spec, spec) if spec else model
    plain, base = logits(model), copy.deepcopy(model)
    model = add_adapter(model, 4, 8, ("auto", "experts"), 0, dropout=0.1)
    torch.testing.assert_close(logits(model), plain, rtol=1e-5, atol=1e-5)
    experts = [layer for layer in adapted(unwrap(model)).values() if isinstance(layer, ParamWrapper)]
    others = [layer for layer in adapted(unwrap(model)).values() if not isinstance(layer, ParamWrapper)]
    assert "experts.down_proj, experts.gate_up_proj" in coverage(model)
    assert all(isinstance(layer.lora_dropout["default"], Dropout) for layer in others)
    assert sum(layer.num_experts == 4 for layer in experts) == 2 * len(decoder_layers(model))
    check_gradients(model)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(logits(model.eval()), plain, rtol=1e-5, atol=1e-5)
    check_file(model, base, tmp_path)
    after = {n.replace(".base_layer", ""): p for n, p in unwrap(model).state_dict().items() if "lora_" not in n}
    before = {name: tensor for name, tensor in base.state_dict().items() if tensor is not None}
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_gradient_checkpointing_changes_nothing_for_experts():
    grads = []
    for checkpointing in (False, True):
        model = filled(add_adapter(frozen(tiny("Mixtral")), 4, 8, ("all", "experts"), 0)).train()
        if checkpointing:
            unwrap(model).gradient_checkpointing_enable({"use_reentrant": False})
            unwrap(model).enable_input_require_grads()
        logits(model).square().sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if "lora_" in n})
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


# -- initialisation ----------------------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("kind", ["Phi3", "Mixtral", "GptOss", "Qwen3Next"])
def test_a_full_rank_adapter_fitted_to_the_error_gives_the_teacher(kind):
    """Fused projections, experts in either layout, layers smaller than the rank."""
    base = tiny(kind)
    moe = any(matrix.is_experts for matrix in matrices(decoder_layers(base)[0]))
    model = add_adapter(frozen(base), 64, 8, ("all", "experts") if moe else ("all",), 0)
    assert (logits(model) - logits(base)).abs().max() > 1e-2
    fit_to_error(model, base, [{"tokens": TOKENS}], "fp32")
    torch.testing.assert_close(logits(model), logits(base), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_adapter_of_an_unquantised_layer_starts_at_zero():
    base = tiny("Mixtral")
    model = add_adapter(frozen(base, "int4/tensor", "none"), 4, 4, ("all", "experts"), 0)
    fit_to_error(model, base, [{"tokens": TOKENS}], "fp32")
    for place, layer in adapted(unwrap(model)).items():
        assert layer.lora_B["default"].weight.any() == ("experts" in place)
    assert hidden_states(model, TOKENS).isfinite().all()
