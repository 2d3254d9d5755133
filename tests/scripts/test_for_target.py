"""--target: trained for a reader, exported to it, and refused before training where it does not fit."""

import json
from types import SimpleNamespace

import pytest
import torch
from records import lines, summary
from small import CACHE, CPU
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.quant.targets import FORMATS, HELD
from qat_lora.run.command_line import parse

SHAPE = {
    "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
SHORT = [*CPU, *["--max-steps", "3", "--batch-size", "4", "--eval-rows", "8", "--log-every", "1", "--seed", "1"]]
BLOCKS = ["--layer-steps", 1, "--layer-rows", 8]  # so that every student is a trained one


@pytest.fixture(scope="module")
def model(tiny_tokenizer, tmp_path_factory):
    """make(type): a small model whose MLP's inner width 256 does not divide."""

    def make(kind: str):
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SHAPE, vocab_size=len(tiny_tokenizer))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def llama(model, run):
    """(a tiny Llama, a cache of it). Do not write to them."""
    folder = model("llama")
    run("build_kd_cache", "--model", folder, "--cache-dir", folder / "cache", *CACHE)
    return folder, folder / "cache"


@pytest.mark.parametrize("target, bits, kinds", [
    ("llama.cpp", 2, {"Q2_K", "Q2_0"}), ("llama.cpp", 5, {"Q5_K", "Q5_0"}), ("vllm", 4, None), ("mlx", 2, None),
    ("mlx", 8, None), ("hf", 3, None),
])  # fmt: skip
def test_a_student_of_a_target_is_trained_and_exported_exactly(llama, run, tmp_path, capsys, target, bits, kinds):
    _, cache = llama
    flags = ["--cache-dir", cache, "--target", target, "--bits", bits, "--output-dir", tmp_path / "run", *SHORT]
    run("train_qat", *flags, *BLOCKS, "--init", "gptq")
    said = capsys.readouterr().out
    assert f"target {target}: " in said and summary(tmp_path / "run")["status"] == "finished"
    losses = [line["loss"] for line in lines(tmp_path / "run") if line["stage"] == "qat" and "loss" in line]
    assert len(losses) == 3 and all(loss < 20 for loss in losses)
    best = ["--checkpoint", tmp_path / "run" / "best.pt"]
    run("export_model", *best, "--format", FORMATS[target], "--output-dir", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert kinds is None or {kind for kind in record["types"].values() if kind.startswith("Q")} == kinds
    if target != "hf":
        assert abs(record["bits_per_weight"] - record["student_bits_per_weight"]) < 0.75
        assert "read back" in capsys.readouterr().out


def test_a_rehearsal_has_the_quantisers_of_the_target(llama, load_script, monkeypatch):
    module, seen = load_script("train_qat"), []
    monkeypatch.setattr(module, "quantize", lambda model, spec: seen.append(spec))
    flags = ["--model", str(llama[0]), "--cache-dir", str(llama[1]), "--target", "llama.cpp", "--bits", "2"]
    backend = SimpleNamespace(world_size=1, rehearsal=lambda tokens: None, place=seen.append)
    with pytest.raises(AttributeError):  # there is no student, since only its quantisers matter here
        module.rehearse(parse(module.Config, "train_qat", flags), backend)
    assert seen[0].mlp.startswith("int2/g16+offset/s4x256")


def test_the_chosen_quantisers_are_resumed_and_recovered(llama, run, tmp_path):
    _, cache = llama
    flags = ["--cache-dir", cache, "--target", "llama.cpp", "--bits", 2, *SHORT, *BLOCKS, "--save-every", 1]
    run("train_qat", *flags, "--output-dir", tmp_path / "whole")
    run("train_qat", *flags, "--output-dir", tmp_path / "parts", "--max-steps", 3)
    run("train_qat", "--resume", tmp_path / "parts", "--max-steps", 5)
    assert summary(tmp_path / "parts")["status"] == "finished"
    best = tmp_path / "whole" / "best.pt"
    recovery = ["--checkpoint", best, "--cache-dir", cache, "--output-dir", tmp_path / "recovery", *SHORT]
    run("train_recovery_lora", *recovery, "--recovery-r", 2)
    for kind in ("gguf", "hf"):
        flags = ["--checkpoint", best, "--adapter", tmp_path / "recovery" / "adapter", "--format", kind]
        run("export_model", *flags, "--output-dir", tmp_path / kind)


def test_an_adapter_goes_to_mlx_and_to_compressed_tensors(llama, run, tmp_path):
    _, cache = llama
    run(
        "train_qat",
        "--cache-dir",
        cache,
        "--mlp",
        "int4/g64",
        "--attn",
        "int4/g64",
        *SHORT,
        "--output-dir",
        tmp_path / "r",
    )
    best = tmp_path / "r" / "best.pt"
    recovery = ["--checkpoint", best, "--cache-dir", cache, "--output-dir", tmp_path / "l", *SHORT]
    run("train_recovery_lora", *recovery, "--recovery-r", 2)
    for kind in ("mlx", "compressed-tensors", "gptq"):
        flags = ["--checkpoint", best, "--adapter", tmp_path / "l" / "adapter", "--format", kind]
        run("export_model", *flags, "--output-dir", tmp_path / kind)
        there = json.loads((tmp_path / kind / "adapter" / "adapter_config.json").read_text())
        assert there.get("num_layers", 2) == 2 and (kind != "mlx" or there["lora_parameters"]["rank"] == 2)


@pytest.mark.parametrize("flags, said", [
    (["--target", "vllm", "--bits", 5], "--bits 5: vllm holds 2, 3, 4, 8; use one of these"),
    (["--bits", 3], "--bits 3 is for a --target; give one, or a quantiser such as --mlp int4/g32"),
    (["--target", "mlx", "--mlp", "int4/g32"], "--target mlx picks --mlp; leave out --mlp int4/g32, or --target"),
    (["--target", "mlx", "--head", "int7/g64"], "mlx cannot hold lm_head, which is int7/g64"),
    (["--target", "llama.cpp", "--head", "uniform4/g32"], "--target llama.cpp cannot hold lm_head"),
])  # fmt: skip
def test_what_a_target_does_not_hold_is_refused_before_training(llama, refuse, tmp_path, flags, said):
    _, cache = llama
    assert said in refuse("train_qat", "--cache-dir", cache, "--output-dir", tmp_path / "run", *flags, *SHORT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", ["train_cot_sft", "train_musclebob_improved"])
def test_fine_tuning_in_low_bits_is_planned_for_a_target(model, run, refuse, capsys, script):
    flags = ["--dry-run", "--model", model("llama"), "--max-prompt-length", 300, "--max-new-tokens", 48]
    run(script, *flags, "--target", "llama.cpp", "--bits", 2)
    said = capsys.readouterr().out
    assert "target llama.cpp: 12 layers int2/g16+offset/s4x256 as Q2_K, 2 layers int2/g64 as Q2_0" in said
    wrong = refuse(script, *flags, "--target", "mlx", "--quantize", "int4/g32")
    assert "--target mlx picks --quantize; leave out --quantize int4/g32, or --target" in wrong
    assert "--bits 3 is for a --target" in refuse(script, *flags, "--bits", 3)


@pytest.mark.parametrize("kind, target, said", [
    ("stablelm", "llama.cpp", "use --target vllm, mlx or hf"),
    ("persimmon", "mlx", "mlx-lm 0.32.2 has no model type 'persimmon'; use hf"),
])  # fmt: skip
def test_a_model_that_a_reader_does_not_know_is_refused(model, run, refuse, tmp_path, kind, target, said):
    folder = model(kind)
    run("build_kd_cache", "--model", folder, "--cache-dir", folder / "cache", *CACHE)
    flags = ["--cache-dir", folder / "cache", "--output-dir", tmp_path / "run", "--target", target, *SHORT]
    assert said in refuse("train_qat", *flags)


@pytest.mark.parametrize("target", HELD)
def test_every_target_names_a_format_of_the_exports(target):
    from qat_lora.export.targets import LAYOUTS

    assert FORMATS[target] in {"gguf", "hf", *LAYOUTS}
