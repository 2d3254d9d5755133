"""Figures equal independent references; sizes equal counts made by hand; bad input gives one line."""

import json
import math
import shutil
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qat_lora.errors import ROOT
from qat_lora.models.loading import load_model
from qat_lora.quant.student import load_student, read_student

LENGTH = 32
MLP_WEIGHTS, ATTENTION_WEIGHTS = 2 * 3 * 64 * 128, 2 * (2 * 64 * 64 + 2 * 32 * 64)
MLP_SCALES, ATTENTION_SCALES = MLP_WEIGHTS // 32, 2 * 4 * (2 * (64 + 64 + 1) + 2 * (32 + 64 + 1))
OTHER_VALUES = 512 * 64 + 5 * 64  # embedding (tied to the head) and norms
ADAPTER_VALUES = 2 * 4 * ((64 + 64) + (128 + 64))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["assignment"][:800])
    return path


@pytest.fixture(scope="module")
def tokens(text, tiny_tokenizer):
    """The whole text as the script should see it: one document, one EOS."""
    ids = tiny_tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([*ids, tiny_tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def tiny_adapter(make_adapter, tiny_model_dir):
    return make_adapter(tiny_model_dir)


@pytest.fixture
def flags(text):
    """Flags for windows of the text."""
    return ["--dataset", text, "--length", LENGTH]


@pytest.fixture
def measure(run, flags, tiny_model_dir, capsys):
    """measure(*flags): the JSON figures of one run on the text."""

    def figures(*more) -> dict:
        base = [] if {"--checkpoint", "--model"} & set(more) else ["--model", tiny_model_dir]
        run("measure_perplexity", *flags, *base, "--device", "cpu", "--json", *more)
        return json.loads(capsys.readouterr().out)

    return figures


@pytest.fixture
def said(refusal, flags):
    """said(*flags): the error of one run on the text."""
    return lambda *more: refusal("measure_perplexity", *flags, *more)


def windows(tokens):
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


@torch.no_grad()
def blocked_nll(model, tokens) -> float:
    """HF's own loss, averaged over the windows."""
    model = model if isinstance(model, torch.nn.Module) else load_model(str(model))
    return sum(model(row[None], labels=row[None]).loss.item() for row in windows(tokens)) / len(windows(tokens))


def other_model(folder, tokenizer, seed=5, **changes):
    """A random model with another seed, saved with a tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{"vocab_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True} | shape | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- perplexity -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("more, count", [([], None), (["--batch-size", 3], None), (["--max-windows", 3], 3)])
def test_blocked_mode_equals_the_loss_of_hf(measure, tokens, tiny_model_dir, more, count):
    figures, count = measure(*more), count or len(windows(tokens))
    expected = blocked_nll(tiny_model_dir, tokens[: count * LENGTH])
    assert figures["nll"] == pytest.approx(expected, rel=1e-5)
    assert figures["ppl"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert (figures["windows"], figures["tokens"]) == (count, count * (LENGTH - 1))
    assert "kl" not in figures


def test_sliding_counts_each_token_once_with_half_a_window_as_default_stride(measure, tokens):
    figures = measure("--mode", "sliding")
    count = (len(tokens) - LENGTH) // (LENGTH // 2) + 1
    assert (figures["windows"], figures["stride"]) == (count, LENGTH // 2)
    assert figures["tokens"] == LENGTH - 1 + (count - 1) * LENGTH // 2


def test_bf16_is_reported_and_changes_the_figure_slightly(measure):
    exact, rounded = measure(), measure("--precision", "bf16")
    assert (exact["precision"], rounded["precision"]) == ("fp32", "bf16")
    assert exact["nll"] != rounded["nll"] == pytest.approx(exact["nll"], rel=1e-2)


# -- divergence -----------------------------------------------------------------------------------------------------
def test_the_kl_of_a_model_to_itself_is_0(measure, tiny_model_dir):
    assert measure("--teacher", tiny_model_dir)["kl"] == 0


@torch.no_grad()
def test_kl_equals_a_dense_reference(measure, tokens, tiny_model_dir, tiny_tokenizer, tmp_path):
    """Extra ids of a wider teacher are left out; probability on extra ids of the model counts against it."""
    other_model(tmp_path / "same", tiny_tokenizer)
    other_model(tmp_path / "wide", tiny_tokenizer, vocab_size=520)
    shutil.copytree(tiny_model_dir, tmp_path / "tiny")
    logits = {path.name: load_model(str(path))(windows(tokens)).logits[:, :-1] for path in tmp_path.iterdir()}
    for model, teacher in (("tiny", "same"), ("tiny", "wide"), ("wide", "tiny")):
        ours, theirs = logits[model].log_softmax(-1)[..., :512], logits[teacher][..., :512].log_softmax(-1)
        kl = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
        figures = measure("--model", tmp_path / model, "--teacher", tmp_path / teacher)
        assert kl > 1e-3 and figures["kl"] == pytest.approx(kl, rel=1e-4)
        assert figures["nll"] == pytest.approx(blocked_nll(tmp_path / model, tokens), rel=1e-5)


# -- student and adapter --------------------------------------------------------------------------------------------
def test_a_student_is_measured_frozen_and_its_bits_are_counted(measure, tokens, tiny_student):
    figures = measure("--checkpoint", tiny_student)
    assert figures["nll"] == pytest.approx(blocked_nll(load_student(tiny_student)[0], tokens), rel=1e-5)
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


def test_an_adapter_is_applied_with_its_alpha_and_its_size_is_counted_once(
    measure, tokens, tiny_student, tiny_adapter, tmp_path
):
    folder = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 24}))
    without, figures = (measure("--checkpoint", tiny_student, *adapter) for adapter in ([], ["--adapter", folder]))
    student = merged(load_student(tiny_student)[0], folder)
    assert figures["nll"] == pytest.approx(blocked_nll(student, tokens), rel=1e-5)
    assert figures["nll"] != pytest.approx(without["nll"], rel=1e-4)
    more = {name: figures[name] - without[name] for name in ("bits_per_weight", "mb")}
    assert more["bits_per_weight"] == pytest.approx(16 * ADAPTER_VALUES / (MLP_WEIGHTS + ATTENTION_WEIGHTS), rel=1e-9)
    assert more["mb"] == pytest.approx(16 * ADAPTER_VALUES / 8e6, rel=1e-9)


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
    inputs = {"model": tiny_model_dir, "dataset": text, "checkpoint": tiny_student, "adapter": tiny_adapter}
    assert {name: figures[name] for name in inputs} == {name: str(value) for name, value in inputs.items()}
    assert figures["kl"] > 0 and "note" not in figures


def test_dry_run_prints_the_plan_and_measures_nothing(measure, tokens):
    plan = measure("--dry-run")
    assert plan["windows"] == len(windows(tokens)) and not {"nll", "ppl"} & plan.keys()


def test_plain_output_shows_the_same_figures(run, flags, tiny_model_dir, measure, capsys):
    figures = measure()
    run("measure_perplexity", *flags, "--model", tiny_model_dir, "--device", "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "text", "NLL", "PPL", "size"]
    assert f"{figures['nll']:.4f} nats" in lines[2] and f"{figures['windows']} windows of {LENGTH}" in lines[1]


def test_a_note_says_that_the_embedded_model_is_4_bit(measure, load_script, tiny_model_dir, monkeypatch):
    script = load_script("measure_perplexity")
    for name in ("load_model", "load_tokenizer"):  # use the tiny model, because the real one takes seconds to load
        load = getattr(script, name)
        monkeypatch.setattr(script, name, lambda _, load=load: load(str(tiny_model_dir)))
    assert "Q4_1" in measure("--model", "smollm2-135m", "--dry-run")["note"]


@pytest.mark.xla
def test_xla_gives_the_same_figures_as_the_cpu(measure, flags, tiny_student, tiny_adapter, tiny_model_dir):
    more = ["--checkpoint", tiny_student, "--adapter", tiny_adapter, "--teacher", tiny_model_dir, "--batch-size", 2]
    command = [sys.executable, ROOT / "scripts/measure_perplexity.py", "--json", *flags, *more, "--device", "xla"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    there, here = json.loads(done.stdout), measure(*more)
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
        (["--length", "1"], "--length 1 must be at least 2; less leaves nothing to predict"),
        (["--streaming"], "--max-windows"),
        (["--bos", "never"], "is not one of auto, on, off"),
        (["--checkpoint", "/no/such/best.pt"], "no such file; train_qat.py writes best.pt"),
    ],
)
def test_bad_flags(refusal, flags, words):
    assert words in refusal("measure_perplexity", *flags)


def test_bad_text(said, tiny_model_dir, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    model = ["--model", tiny_model_dir]
    short = said(*model, "--dataset", tmp_path / "short.txt", "--length", 512)
    assert "fewer than one window of 512; use a shorter --length" in short
    assert "no such file" in said(*model, "--dataset", tmp_path / "absent.txt")
    assert "has no BOS token" in said(*model, "--bos", "on")


def test_bad_checkpoint(said, tiny_student, tiny_tokenizer, tmp_path):
    other = other_model(tmp_path / "other", tiny_tokenizer)
    message = said("--checkpoint", tiny_student, "--model", other)
    assert f"{tiny_student} was made from model" in message and f"not '{other}'" in message and "--model" in message
    content = read_student(tiny_student)
    content["tensors"]["model.norm.weight"][0] = math.nan
    torch.save(content, tmp_path / "best.pt")
    assert "the NLL is nan" in said("--checkpoint", tmp_path / "best.pt")


def test_incomparable_teachers_are_refused(said, tiny_model_dir, tmp_path):
    grown = AutoTokenizer.from_pretrained(tiny_model_dir)
    grown.add_tokens(["<tool>"])
    other = other_model(tmp_path / "other", grown, vocab_size=520)
    assert "has another tokenizer" in said("--model", tiny_model_dir, "--teacher", other)
    short = other_model(tmp_path / "short", grown)
    for model in (["--model", short], ["--model", tiny_model_dir, "--teacher", short]):
        assert "ids up to 512 ('<tool>'), beyond the 512 rows of its embedding" in said(*model)


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
    rows = windows(torch.cat([torch.tensor([1]), tokens])).clone()
    rows[:, 0] = 1
    figures = measure("--model", bos_model_dir)
    assert figures["nll"] == pytest.approx(blocked_nll(bos_model_dir, rows.flatten()), rel=1e-5)
    assert figures["bos"] == "<|im_start|>" and figures["tokens"] == len(rows) * (LENGTH - 1)
    off = measure("--model", bos_model_dir, "--bos", "off")
    assert off["nll"] == pytest.approx(blocked_nll(bos_model_dir, tokens), rel=1e-5) and off["bos"] is None
    sliding = measure("--model", bos_model_dir, "--mode", "sliding", "--stride", 8)
    assert sliding["tokens"] == LENGTH - 1 + 8 * (sliding["windows"] - 1)


def test_bad_adapters(said, tiny_model_dir, tiny_tokenizer, tiny_adapter, text, tmp_path):
    def copied(name):
        return shutil.copytree(tiny_adapter, tmp_path / name)

    bad = {tmp_path / "absent": "no such folder", text.parent: "is not a PEFT folder: adapter_config.json or ada"}
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        bad[copied(file)] = "is damaged"
        (tmp_path / file / file).write_bytes((tiny_adapter / file).read_bytes()[:-100])
    lacking, key = copied("lacking"), "layers.1.mlp.down_proj.lora_B.weight"
    tensors = load_file(tiny_adapter / "adapter_model.safetensors")
    tensors.pop(f"base_model.model.model.{key}")
    save_file(tensors, lacking / "adapter_model.safetensors")
    bad[lacking] = f"{key} is in only one of them"
    for name, model, target, words in (
        ("head", tiny_model_dir, "lm_head", "changes lm_head, the model's LM head"),
        ("narrow", other_model(tmp_path / "n", tiny_tokenizer, hidden_size=32), "q_proj", "does not fit the model"),
        ("deep", other_model(tmp_path / "d", tiny_tokenizer, num_hidden_layers=3), "q_proj", "is in only one of them"),
    ):
        adapted = get_peft_model(load_model(str(model)), LoraConfig(target_modules=[target], task_type="CAUSAL_LM"))
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        bad[tmp_path / name] = words
    for folder, words in bad.items():
        assert words in said("--model", tiny_model_dir, "--adapter", folder)
