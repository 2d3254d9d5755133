"""Does llama.cpp give an exported student the same perplexity as we do, on the same tokens of embedded text?

llama.cpp rounds the inputs of products with block types to 8 bits, in blocks of 32. That alone changes the perplexity
of SmolLM2-135M by half a per cent, also with its publisher's own file, so ours is computed with the same rounding; the
two still differ by noise of about 0.2% over these tokens. F16 has no such rounding and must agree to 0.1%.
"""

import gc
import math
import runpy
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from qat_lora.errors import ROOT
from qat_lora.export.gguf import ADAPTER_FILE, MODEL_FILE, plan_gguf, write_gguf
from qat_lora.export.source import load_source
from qat_lora.lora.adapter import load_adapter
from qat_lora.models.loading import EMBEDDED, load_model, load_tokenizer
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import StudentSpec, load_student, quantize, save_student

pytestmark = pytest.mark.peer
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; make setup-peers builds it")

WINDOW, WINDOWS, NEAR = 512, 4, 0.005
rounding_inputs = runpy.run_path(str(ROOT / "benchmarks" / "served.py"))["rounding_inputs"]
STUDENTS = {  # an untrained 2-bit model would give nonsense, so only its attention is quantised
    "Q2_0": (StudentSpec(mlp="none", attn="int2/g64"), {"Q2_0"}),
    "Q4_0": (StudentSpec(mlp="int4/g32", attn="int4/g32", head="int8/g32"), {"Q4_0", "Q8_0"}),
    "Q4_1": (StudentSpec(mlp="balanced4/g32", attn="balanced4/g32"), {"Q4_1"}),
}


@pytest.fixture(scope="module")
def windows():
    ids = load_tokenizer(EMBEDDED)(topics["assignment"], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: WINDOW * WINDOWS]).view(WINDOWS, WINDOW)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """student(type): a folder with best.pt of the embedded model, quantised to fit the type; also for its exports."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            spec = STUDENTS[kind][0]
            model = quantize(load_model(EMBEDDED), spec)
            initialise(model, search=kind == "Q2_0")  # the search takes minutes; 4 bits do not need it
            save_student(folder / "best.pt", model, EMBEDDED, spec, {})
            made[kind] = folder
        return made[kind]

    return make


def round_inputs(model, size=32):
    """Round the inputs of every quantised layer of a student as llama.cpp does."""
    for layer in quantized_layers(model).values():
        layer.register_forward_pre_hook(rounding_inputs(size))
    return model


@torch.no_grad()
def our_nll(model, windows) -> float:
    return sum(model(row[None], labels=row[None]).loss.item() for row in windows) / len(windows)


def their_nll(folder, windows, **options) -> float:
    model = llama_cpp.Llama(
        str(folder / MODEL_FILE), n_ctx=512, n_batch=512, logits_all=True, verbose=False, seed=0, **options
    )
    total = 0.0
    for row in windows.tolist():
        model.reset()
        model.eval(row)
        logits = torch.from_numpy(np.array(model.scores[: len(row)])).log_softmax(-1)
        total -= logits[:-1].gather(1, torch.tensor(row[1:])[:, None]).mean().item()
    model.close()
    return total / len(windows)


def exported(folder, name, adapter=None, wanted="auto", merged=False):
    source = load_source(folder / "best.pt", adapter)
    (folder / name).mkdir()
    plan = plan_gguf(source, wanted, merged)
    write_gguf(source, plan, folder / name, folder / name)
    return folder / name, {entry.kind for entry in plan.entries if entry.quantizer}


def compare(what, theirs, exact, ours, near=NEAR):
    """Compare their NLL with ours, which has the same rounding; print it with our exact one, too."""
    ratio, plain = math.exp(theirs - ours), math.exp(theirs - exact)
    here = f"{math.exp(ours):.4f} with rounded inputs (ratio {ratio:.5f}), {math.exp(exact):.4f} without ({plain:.5f})"
    print(f"\n{what}: perplexity of llama.cpp {math.exp(theirs):.4f}, here {here}", flush=True)
    assert abs(ratio - 1) <= near


@pytest.mark.parametrize("kind", STUDENTS)
def test_perplexity_of_a_type(student, windows, kind):
    folder, kinds = exported(student(kind), "plain")
    assert kinds == STUDENTS[kind][1]
    model = load_student(student(kind) / "best.pt")[0]
    exact = our_nll(model, windows)
    ours = our_nll(round_inputs(model), windows)
    compare(kind, their_nll(folder, windows), exact, ours)


def test_perplexity_of_the_same_weights_as_f16(student, windows):
    """Covers names, row order, rotation, norms and tokens, without rounding of inputs."""
    folder, _ = exported(student("Q4_1"), "f16", wanted="F16")
    exact = our_nll(load_student(student("Q4_1") / "best.pt")[0], windows)
    compare("F16", their_nll(folder, windows), exact, exact, 0.001)


@pytest.mark.parametrize("merged", [False, True])
def test_perplexity_with_an_adapter(student, windows, merged):
    """The adapter as adapter.gguf, loaded by llama.cpp, and merged into F16 layers. It must change the perplexity."""
    base = student("Q4_1")
    adapter = random_adapter(base / f"adapter-{merged}")
    model = load_student(base / "best.pt")[0]
    alone = our_nll(model, windows)
    exact = ours = our_nll(load_adapter(model, adapter), windows)
    assert abs(exact - alone) > 0.05
    if not merged:
        model = load_student(base / "best.pt")[0]
        ours = our_nll(load_adapter(round_inputs(model), adapter), windows)
    del model
    gc.collect()
    folder, _ = exported(base, f"merged-{merged}", adapter, merged=merged)
    options = {} if merged else {"lora_path": str(folder / ADAPTER_FILE)}
    compare(f"adapter, merged: {merged}", their_nll(folder, windows, **options), exact, ours)


def random_adapter(folder, name=EMBEDDED, spread=0.06):
    """A LoRA on every projection of a model, far enough from 0 to matter."""
    targets = [f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    random = torch.Generator().manual_seed(0)
    model = get_peft_model(load_model(name), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = torch.randn(parameter.shape, generator=random) * spread
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def test_tokens_and_chat_template_are_the_same(student):
    """In the file that llama.cpp reads, for texts that are split in different ways."""
    folder = student("Q4_0") / "plain"
    if not folder.exists():
        folder, _ = exported(student("Q4_0"), "plain")
    model = llama_cpp.Llama(str(folder / MODEL_FILE), n_ctx=512, vocab_only=True, verbose=False)
    tokenizer = load_tokenizer(EMBEDDED)
    for text in (topics["assignment"][:3000], "x = 12345 + 6.7\n\n\tdef f():  pass", "naïve café 東京 'll I've"):
        theirs = model.tokenize(text.encode(), add_bos=False, special=False)
        assert theirs == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert model.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    model.close()


# -- tiny random models: seconds -------------------------------------------------------------------------------------
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 520, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TINY = {
    "llama": tf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **SHAPE),
    "qwen2": tf.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **SHAPE),
    "qwen3": tf.Qwen3Config(
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, tie_word_embeddings=True, **SHAPE
    ),
}
LAYOUTS = {
    "F16": (StudentSpec("lut4/g32", "int4/r4", "lut4/g32"), 1e-2),
    "Q2_0": (StudentSpec("int2/g64", "int2/g64", "int2/g64"), 5e-2),
    "Q4_0": (StudentSpec("balanced2/g32", "int4/tensor", "balanced3/g32"), 5e-2),
    "Q4_1": (StudentSpec("balanced4/g32", "balanced4/g64", "balanced4/g32"), 5e-2),
    "Q8_0": (StudentSpec("int8/g32", "int8/g64", "int8/g32"), 5e-2),
}


@pytest.fixture(scope="module")
def tiny(full_model_dir):
    """tiny(kind): a folder with a random model in which every parameter has an effect."""
    return lambda kind: full_model_dir(tf.AutoModelForCausalLM.from_config(TINY[kind]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("adapted", [False, True])
def test_logits_of_every_architecture_and_type(tiny, tmp_path, kind, layout, adapted):
    """RMS of the difference in units of the logits' standard deviation; a wrong row order makes it about 1."""
    spec, near = LAYOUTS[layout]
    tokens = torch.arange(3, 67)
    ours, theirs, alone, kinds = both_logits(
        str(tiny(kind)), spec, tmp_path, adapted, tokens, 0 if layout == "F16" else 32
    )
    far = distance(theirs, ours, ours)
    print(f"\n{kind} {layout} adapter {adapted}: {far:.5f}", flush=True)
    assert kinds == {layout} and far < near
    assert not adapted or (alone - ours).std() > 0.3 * ours.std()


WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
BLOCKS = {f"Q{bits}_K": f"q{bits}_k" for bits in range(2, 7)} | dict.fromkeys(("TQ1_0", "TQ2_0"), "ternary/g256")


@pytest.mark.parametrize("kind", BLOCKS)
def test_logits_of_types_with_blocks_of_256(full_model_dir, tmp_path, kind):
    """With one block, since each amplifies roundings that fall the other way. A wrong order of codes, scales or rows
    makes it about 1."""
    config = tf.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **WIDE | {"num_hidden_layers": 1}
    )
    name, tokens = str(full_model_dir(tf.AutoModelForCausalLM.from_config(config))), torch.arange(3, 67)
    spec = StudentSpec(BLOCKS[kind], BLOCKS[kind])
    ours, theirs, _, kinds = both_logits(name, spec, tmp_path, False, tokens, 256, wanted=kind)
    far = distance(theirs, ours, ours)
    print(f"\nllama {kind}: {far:.5f}", flush=True)
    assert kinds == {kind} and far < 5e-2


def both_logits(name, spec, tmp_path, adapted, tokens, rounds=0, search=True, wanted="auto"):
    """Logits of a student, ours and llama.cpp's, and ours without the adapter; and the types of its export. rounds:
    round the inputs as llama.cpp does, in blocks of so many; search: as in `initialise`."""
    model = quantize(load_model(name), spec)
    initialise(model, search=search)
    save_student(tmp_path / "best.pt", model, name, spec, {})
    adapter = random_adapter(tmp_path / "adapter", name, 0.2) if adapted else None
    folder, kinds = exported(tmp_path, "gguf", adapter, wanted)
    model = load_student(tmp_path / "best.pt")[0]
    model = round_inputs(model, rounds) if rounds else model
    alone = logits_of(model, tokens)
    ours = logits_of(load_adapter(model, adapter), tokens) if adapted else alone
    theirs = their_logits(folder, tokens, **({"lora_path": str(folder / ADAPTER_FILE)} if adapted else {}))
    return ours, theirs, alone, kinds


def distance(one, other, scale) -> float:
    return ((one - other).square().mean().sqrt() / scale.std()).item()


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
UNSCALED = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
TWO = {"sliding_attention": UNSCALED, "full_attention": LINEAR | {"rope_theta": 1e6}}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GRANITE = {"logits_scaling": 8.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3, "embedding_multiplier": 12.0}
SETTINGS = {  # the model, and the changes that remove the tested setting
    "llama3": (tf.LlamaConfig(rope_parameters=LLAMA3, **HEADS, **SHAPE), {"rope_parameters": UNSCALED}),
    "linear": (tf.LlamaConfig(rope_parameters=LINEAR, **HEADS, **SHAPE), {"rope_parameters": UNSCALED}),
    "yarn": (tf.Qwen2Config(rope_parameters=YARN, **HEADS, **SHAPE), {"rope_parameters": UNSCALED}),
    "mistral": (tf.MistralConfig(sliding_window=None, **HEADS, **SHAPE), {"sliding_window": 8}),
    "granite": (tf.GraniteConfig(**GRANITE, **HEADS, **SHAPE),
                {"attention_multiplier": 0.25, "residual_multiplier": 1.0}),
    "gemma3": (tf.Gemma3TextConfig(head_dim=16, sliding_window=8, **HEADS, **SHAPE), {"sliding_window": 512}),
    "gemma3 mixed": (
        tf.Gemma3TextConfig(head_dim=32, sliding_window=8, query_pre_attn_scalar=24, final_logit_softcapping=5.0,
                            layer_types=["sliding_attention", "full_attention"], rope_parameters=TWO, **HEADS, **SHAPE),
        {"final_logit_softcapping": None},
    ),
    "gemma3 full": (tf.Gemma3TextConfig(head_dim=16, layer_types=["full_attention"] * 2, **HEADS, **SHAPE),
                    {"query_pre_attn_scalar": 16}),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("adapted", [False, True])
def test_logits_of_settings(full_model_dir, tmp_path, what, adapted):
    """Rotary scaling, windows, norms and multipliers; without the setting each model gives different logits."""
    config, without = SETTINGS[what]
    name = str(full_model_dir(tf.AutoModelForCausalLM.from_config(config)))
    tokens = torch.randint(3, 512, (100,), generator=torch.Generator().manual_seed(0))
    ours, theirs, _, _ = both_logits(name, StudentSpec("lut4/g32", "int4/r4"), tmp_path, adapted, tokens, search=False)
    far = distance(theirs, ours, ours)
    if not adapted:
        other = tf.AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | without)).eval()
        other.load_state_dict(load_student(tmp_path / "best.pt")[0].state_dict(), strict=False)
        off = distance(logits_of(other, tokens), theirs, ours)
        print(f"\n{what}: {far:.5f}, without the setting {off:.5f}", flush=True)
        assert off > 5 * far
    assert far < 1e-2


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens[None]).logits[0]


def their_logits(folder, tokens, **options):
    model = llama_cpp.Llama(str(folder / MODEL_FILE), n_ctx=128, n_batch=128, logits_all=True, verbose=False, **options)
    model.eval(tokens.tolist())
    logits = torch.from_numpy(np.array(model.scores[: len(tokens)]))
    model.close()
    return logits
