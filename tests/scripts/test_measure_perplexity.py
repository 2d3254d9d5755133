"""Figures equal independent references; sizes equal counts made by hand; bad input gives one line."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qat_lora.models.loading import load_model
from qat_lora.quant.student import load_student, read_student
from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 32
MLP_WEIGHTS, ATTENTION_WEIGHTS = 2 * 3 * 64 * 128, 2 * (2 * 64 * 64 + 2 * 32 * 64)
MLP_SCALES, ATTENTION_SCALES = MLP_WEIGHTS // 32, 2 * 4 * (2 * (64 + 64 + 1) + 2 * (32 + 64 + 1))
OTHER_VALUES = 512 * 64 + 5 * 64  # embedding (tied to the head) and norms
ADAPTER_VALUES = 2 * 4 * ((64 + 64) + (128 + 64))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["assignment"][:800])
    return path


@pytest.fixture(scope="module")
def tokens(text, tiny_tokenizer):
    """The whole text as the script should see it: one document, one EOS."""
    ids = tiny_tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([*ids, tiny_tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def tiny_student(make_student, tiny_model_dir):
    return make_student(tiny_model_dir)


@pytest.fixture(scope="module")
def tiny_adapter(make_adapter, tiny_model_dir):
    return make_adapter(tiny_model_dir)


@pytest.fixture
def measure(load_script, text, tiny_model_dir, capsys):
    """measure(*flags): the JSON figures of one run on the text."""
    script = load_script("measure_perplexity")

    def run(*flags) -> dict:
        flags = ["--dataset", text, "--length", LENGTH, "--device", "cpu", "--json", *flags]
        if not {"--checkpoint", "--model"} & set(flags):
            flags += ["--model", tiny_model_dir]
        script.main(parse(script.Config, "measure_perplexity", list(map(str, flags))))
        return json.loads(capsys.readouterr().out)

    return run


@torch.no_grad()
def blocked_nll(model, tokens) -> float:
    """HF's own loss, averaged over the windows."""
    windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return sum(model(window[None], labels=window[None]).loss.item() for window in windows) / len(windows)


def other_model(folder, tokenizer, seed=5, **changes):
    """A random model with another seed, saved with a tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{"vocab_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True} | shape | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- perplexity -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_blocked_mode_equals_the_loss_of_hf(measure, tokens, tiny_model_dir, batch_size):
    figures = measure("--batch-size", batch_size)
    expected = blocked_nll(load_model(str(tiny_model_dir)), tokens)
    assert figures["nll"] == pytest.approx(expected, rel=1e-5)
    assert figures["ppl"] == pytest.approx(math.exp(expected), rel=1e-4)
    count = len(tokens) // LENGTH
    assert (figures["windows"], figures["tokens"]) == (count, count * (LENGTH - 1))
    assert "kl" not in figures


@torch.no_grad()
def test_sliding_by_one_gives_every_token_its_full_context(measure, tokens, tiny_model_dir):
    figures = measure("--mode", "sliding", "--stride", 1, "--max-windows", 40)
    model = load_model(str(tiny_model_dir))
    read = tokens[: LENGTH + 39]
    losses = []
    for t in range(1, len(read)):
        context = read[max(0, t - LENGTH + 1) : t]
        losses.append(F.cross_entropy(model(context[None]).logits[0, -1], read[t]).item())
    assert figures["tokens"] == len(losses)
    assert figures["nll"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_sliding_counts_each_token_once_with_half_a_window_as_default_stride(measure, tokens):
    figures = measure("--mode", "sliding")
    count = (len(tokens) - LENGTH) // (LENGTH // 2) + 1
    assert (figures["windows"], figures["stride"]) == (count, LENGTH // 2)
    assert figures["tokens"] == LENGTH - 1 + (count - 1) * LENGTH // 2


def test_max_windows_limits_to_the_start_of_the_text(measure, tokens, tiny_model_dir):
    first = blocked_nll(load_model(str(tiny_model_dir)), tokens[: 3 * LENGTH])
    assert measure("--max-windows", 3)["nll"] == pytest.approx(first, rel=1e-5)


def test_bf16_is_reported_and_changes_the_figure_slightly(measure):
    exact, rounded = measure(), measure("--precision", "bf16")
    assert (exact["precision"], rounded["precision"]) == ("fp32", "bf16")
    assert rounded["nll"] != exact["nll"]
    assert rounded["nll"] == pytest.approx(exact["nll"], rel=1e-2)


# -- divergence -----------------------------------------------------------------------------------------------------
def test_the_kl_of_a_model_to_itself_is_0(measure, tiny_model_dir):
    assert measure("--teacher", tiny_model_dir)["kl"] == 0


@torch.no_grad()
def test_kl_equals_a_dense_reference(measure, tokens, tiny_model_dir, tiny_tokenizer, tmp_path):
    folder = other_model(tmp_path, tiny_tokenizer)
    windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    ours, theirs = (load_model(str(m))(windows).logits[:, :-1].log_softmax(-1) for m in (tiny_model_dir, folder))
    expected = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean().item()
    assert measure("--teacher", folder)["kl"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3


# -- student and adapter --------------------------------------------------------------------------------------------
def test_a_student_is_measured_frozen_and_its_bits_are_counted(measure, tokens, tiny_student):
    figures = measure("--checkpoint", tiny_student)
    student, _ = load_student(tiny_student)
    assert figures["nll"] == pytest.approx(blocked_nll(student, tokens), rel=1e-5)
    assert figures["nll"] != pytest.approx(measure()["nll"], rel=1e-5)
    bits = MLP_WEIGHTS * 2 + ATTENTION_WEIGHTS * 4 + 16 * (MLP_SCALES + ATTENTION_SCALES)
    assert figures["bits_per_weight"] == pytest.approx(bits / (MLP_WEIGHTS + ATTENTION_WEIGHTS), rel=1e-12)
    assert figures["mb"] == pytest.approx((bits + 16 * OTHER_VALUES) / 8e6, rel=1e-12)


def merged(model, folder):
    """The model with alpha/r · B·A added to its weights by hand, from the adapter's file."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" in tensors:
            update = tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
            module.weight.data += config["lora_alpha"] / config["r"] * update
    return model


def with_alpha(folder, target, alpha):
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
    return target


@pytest.mark.parametrize("alpha", [8, 24])
def test_an_adapter_is_applied_with_its_alpha(measure, tokens, tiny_student, tiny_adapter, tmp_path, alpha):
    folder = with_alpha(tiny_adapter, tmp_path / "adapter", alpha)
    figures = measure("--checkpoint", tiny_student, "--adapter", folder)
    student, _ = load_student(tiny_student)
    alone = blocked_nll(student, tokens)
    assert figures["nll"] == pytest.approx(blocked_nll(merged(student, folder), tokens), rel=1e-5)
    assert figures["nll"] != pytest.approx(alone, rel=1e-4)


def test_an_adapters_size_is_counted_once(measure, tiny_student, tiny_adapter):
    without, figures = (
        measure("--checkpoint", tiny_student),
        measure("--checkpoint", tiny_student, "--adapter", tiny_adapter),
    )
    more = 16 * ADAPTER_VALUES
    assert figures["bits_per_weight"] - without["bits_per_weight"] == pytest.approx(
        more / (MLP_WEIGHTS + ATTENTION_WEIGHTS), rel=1e-9
    )
    assert figures["mb"] - without["mb"] == pytest.approx(more / 8e6, rel=1e-9)


def test_an_adapter_is_applied_to_the_base_model(measure, tokens, tiny_model_dir, tiny_adapter):
    figures, base = measure("--adapter", tiny_adapter), measure()
    model = merged(load_model(str(tiny_model_dir)), tiny_adapter)
    assert figures["nll"] == pytest.approx(blocked_nll(model, tokens), rel=1e-5)
    values = MLP_WEIGHTS + ATTENTION_WEIGHTS + OTHER_VALUES
    more = 16 * ADAPTER_VALUES / (MLP_WEIGHTS + ATTENTION_WEIGHTS)
    assert (base["bits_per_weight"], figures["bits_per_weight"]) == (16, pytest.approx(16 + more))
    assert base["mb"] == pytest.approx(16 * values / 8e6, rel=1e-12)
    assert figures["mb"] == pytest.approx(16 * (values + ADAPTER_VALUES) / 8e6, rel=1e-12)


# -- output ---------------------------------------------------------------------------------------------------------
def test_json_output_names_its_inputs(measure, text, tiny_student, tiny_model_dir, tiny_adapter):
    figures = measure("--checkpoint", tiny_student, "--adapter", tiny_adapter, "--teacher", tiny_model_dir)
    assert (figures["model"], figures["dataset"]) == (str(tiny_model_dir), str(text))
    assert (figures["checkpoint"], figures["adapter"]) == (str(tiny_student), str(tiny_adapter))
    assert figures["kl"] > 0 and "note" not in figures


def test_dry_run_prints_the_plan_and_measures_nothing(measure, tokens):
    plan = measure("--dry-run")
    assert plan["windows"] == len(tokens) // LENGTH
    assert not {"nll", "ppl"} & plan.keys()


def test_plain_output_shows_the_same_figures(load_script, text, tiny_model_dir, measure, capsys):
    figures = measure()
    script = load_script("measure_perplexity")
    flags = ["--dataset", str(text), "--length", str(LENGTH), "--model", str(tiny_model_dir), "--device", "cpu"]
    script.main(parse(script.Config, "measure_perplexity", flags))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "text", "NLL", "PPL", "size"]
    assert f"{figures['nll']:.4f} nats" in lines[2] and f"{figures['windows']} windows of {LENGTH}" in lines[1]


def test_a_note_says_that_the_embedded_model_is_4_bit(measure, load_script, tiny_model_dir, monkeypatch):
    script = load_script("measure_perplexity")
    for name in ("load_model", "load_tokenizer"):  # use the tiny model, because the real one takes seconds to load
        load = getattr(script, name)
        monkeypatch.setattr(script, name, lambda _, load=load: load(str(tiny_model_dir)))
    assert "Q4_1" in measure("--model", "smollm2-135m", "--dry-run")["note"]
    assert "Q4_1" in measure("--teacher", "smollm2-135m", "--dry-run")["note"]


@pytest.mark.xla
def test_xla_gives_the_same_figures_as_the_cpu(measure, text, tiny_student, tiny_adapter, tiny_model_dir):
    flags = ["--checkpoint", tiny_student, "--adapter", tiny_adapter, "--teacher", tiny_model_dir, "--batch-size", 2]
    command = [sys.executable, ROOT / "scripts/measure_perplexity.py", "--json", "--dataset", text, "--length", LENGTH]
    command = list(map(str, [*command, *flags, "--device", "xla"]))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    there, here = json.loads(done.stdout), measure(*flags)
    assert there.pop("device") == "xla" and here.pop("device") == "cpu"
    for name in ("nll", "ppl", "kl"):
        assert there.pop(name) == pytest.approx(here.pop(name), rel=1e-4)
    assert there == here


# -- bad input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--mode", "slide"], "not one of blocked, sliding"),
        (["--stride", "4"], "--stride 4 is for --mode sliding"),
        (["--mode", "sliding", "--stride", "512"], "from 1 to 511"),
        (["--mode", "sliding", "--stride", "0"], "from 1 to 511"),
        (["--length", "1"], "--length 1 must be at least 2; less leaves nothing to predict"),
        (["--max-windows", "0"], "--max-windows 0 must be at least 1"),
        (["--thinking", "maybe"], "--thinking 'maybe' is not one of"),
        (["--streaming"], "--max-windows"),
        (["--max-window", "3"], "did you mean --max-windows?"),
        (["--precision", "fp16"], "not one of auto, fp32, bf16"),
        (["--model", "/no/such/model"], "no such folder"),
        (["--checkpoint", "/no/such/best.pt"], "no such file; train_qat.py writes best.pt"),
    ],
)
def test_bad_flags(refusal, flags, words):
    assert words in refusal("measure_perplexity", *flags)


def test_bad_text(refusal, tiny_model_dir, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    flags = ["--model", tiny_model_dir, "--dataset"]
    assert "fewer than one window of 512; use a shorter --length" in refusal("measure_perplexity", *flags, short)
    assert "no such file" in refusal("measure_perplexity", *flags, tmp_path / "absent.txt")


def test_bad_checkpoint(refusal, tiny_student, tmp_path):
    damaged = tmp_path / "best.pt"
    damaged.write_bytes(tiny_student.read_bytes()[:-2000])
    assert "damaged" in refusal("measure_perplexity", "--checkpoint", damaged)
    assert "change --model" in refusal("measure_perplexity", "--checkpoint", tiny_student, "--model", "smollm2-135m")


def test_weights_with_nan_are_refused(refusal, tiny_student, text, tmp_path):
    content = read_student(tiny_student)
    content["tensors"]["model.norm.weight"][0] = math.nan
    torch.save(content, tmp_path / "best.pt")
    said = refusal("measure_perplexity", "--checkpoint", tmp_path / "best.pt", "--dataset", text, "--length", LENGTH)
    assert "the NLL is nan" in said


def test_incomparable_teachers_are_refused(refusal, tiny_model_dir, tiny_tokenizer, text, tmp_path):
    flags = ["--model", tiny_model_dir, "--dataset", text, "--length", LENGTH, "--teacher"]
    grown = AutoTokenizer.from_pretrained(tiny_model_dir)
    grown.add_tokens(["<tool>"])
    other = other_model(tmp_path / "other", grown, vocab_size=520)
    assert "has another tokenizer" in refusal("measure_perplexity", *flags, other)
    short = other_model(tmp_path / "short", grown)
    for model in (["--model", short], ["--model", tiny_model_dir, "--teacher", short]):
        said = refusal("measure_perplexity", *model, "--dataset", text, "--length", LENGTH)
        assert "ids up to 512 ('<tool>'), beyond the 512 rows of its embedding" in said


def test_kl_to_a_teacher_that_is_padded_differently(measure, tiny_model_dir, tiny_tokenizer, tokens, tmp_path):
    """The teacher's extra ids are left out; probability that the model gives to its own extra ids counts against it."""
    wider = other_model(tmp_path / "wider", tiny_tokenizer, vocab_size=520)
    logits = {}
    for folder in (tiny_model_dir, wider):
        with torch.no_grad():
            rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
            logits[folder] = load_model(str(folder))(input_ids=rows).logits[:, :-1]
    for model, teacher in ((tiny_model_dir, wider), (wider, tiny_model_dir)):
        ours, theirs = logits[model].log_softmax(-1)[..., :512], logits[teacher][..., :512].log_softmax(-1)
        kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        figures = measure("--model", model, "--teacher", teacher)
        assert figures["kl"] == pytest.approx(float(kl), rel=1e-4)
        assert figures["nll"] == pytest.approx(blocked_nll(load_model(str(model)), tokens), rel=1e-5)


@pytest.fixture(scope="module")
def bos_model_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model with a tokenizer that puts <|im_start|> before a text."""
    folder = tmp_path_factory.mktemp("bos")
    shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"][0] == 1
    return folder


def test_every_window_begins_with_bos_if_the_tokenizer_adds_it(measure, bos_model_dir, tokens):
    model = load_model(str(bos_model_dir))
    whole = torch.cat([torch.tensor([1]), tokens])
    rows = whole[: len(whole) // LENGTH * LENGTH].view(-1, LENGTH).clone()
    rows[:, 0] = 1
    figures = measure("--model", bos_model_dir)
    assert figures["nll"] == pytest.approx(blocked_nll(model, rows.flatten()), rel=1e-5)
    assert figures["bos"] == "<|im_start|>" and figures["tokens"] == len(rows) * (LENGTH - 1)
    off = measure("--model", bos_model_dir, "--bos", "off")
    assert off["nll"] == pytest.approx(blocked_nll(model, tokens), rel=1e-5) and off["bos"] is None
    sliding = measure("--model", bos_model_dir, "--mode", "sliding", "--stride", 8)
    assert sliding["tokens"] == LENGTH - 1 + 8 * (sliding["windows"] - 1)


def test_bos_is_refused_if_the_tokenizer_has_none(refusal, tiny_model_dir, text):
    assert "has no BOS token" in refusal(
        "measure_perplexity", "--model", tiny_model_dir, "--dataset", text, "--bos", "on"
    )
    assert "is not one of auto, on, off" in refusal("measure_perplexity", "--model", tiny_model_dir, "--bos", "never")


def adapter_of(model_dir, folder, config):
    get_peft_model(load_model(str(model_dir)), config).save_pretrained(folder, save_embedding_layers=False)
    return folder


def test_bad_adapters(refusal, tiny_model_dir, tiny_tokenizer, tiny_adapter, text, tmp_path):
    def said(folder):
        flags = ["--model", tiny_model_dir, "--dataset", text, "--length", LENGTH, "--adapter", folder]
        return refusal("measure_perplexity", *flags)

    assert "no such folder" in said(tmp_path / "absent")
    assert "is not a PEFT folder: adapter_config.json or adapter_model.safetensors is missing" in said(text.parent)

    for file, words in (("adapter_model.safetensors", "is damaged"), ("adapter_config.json", "is damaged")):
        damaged = shutil.copytree(tiny_adapter, tmp_path / file)
        (damaged / file).write_bytes((damaged / file).read_bytes()[:-100])
        assert words in said(damaged)

    kinds = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    ia3 = adapter_of(tiny_model_dir, tmp_path / "ia3", IA3Config(feedforward_modules=[], **kinds))
    assert "peft_type IA3" in said(ia3)
    head = adapter_of(tiny_model_dir, tmp_path / "head", LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert "changes the LM head" in said(head)

    narrow = other_model(tmp_path / "narrow", tiny_tokenizer, hidden_size=32)
    assert "does not fit the model" in said(adapter_of(narrow, tmp_path / "of_narrow", LoraConfig(**kinds)))
    deep = other_model(tmp_path / "deep", tiny_tokenizer, num_hidden_layers=3)
    assert "layers.2.self_attn.q_proj.lora_A.weight is in only one of them" in said(
        adapter_of(deep, tmp_path / "of_deep", LoraConfig(**kinds))
    )
    lacking = shutil.copytree(tiny_adapter, tmp_path / "lacking")
    tensors = load_file(lacking / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight")
    save_file(tensors, lacking / "adapter_model.safetensors")
    assert "layers.1.mlp.down_proj.lora_B.weight is in only one of them" in said(lacking)
