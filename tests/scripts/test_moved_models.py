"""Caches, students and adapters work with their model wherever it is moved, and with no other model; a faulty model
gives one line before anything is written."""

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from small import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.errors import UserError
from qat_lora.kd.cache import read_manifest
from qat_lora.lora.adapter import save_adapter
from qat_lora.lora.add import add_adapter
from qat_lora.models.loading import load_model
from qat_lora.quant.student import load_student, read_student

CACHE = ["--length", 16, "--max-rows", 32, "--heldout-fraction", 0.25, "--rows-per-shard", 8, "--device", "cpu",
         "--precision", "fp32"]  # fmt: skip
QAT = [*SMALL, "--max-steps", 6, "--init", "rtn", "--learning-rate", 3e-3, "--warmup-steps", 0]  # learns at once
PPL = ["--length", 16, "--max-windows", 2, "--device", "cpu", "--dataset", "embedded"]


@pytest.fixture
def here(sharp_model_dir, tmp_path, monkeypatch):
    """A working directory with the model in m/."""
    shutil.copytree(sharp_model_dir, tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(run, here):
    """The same with a cache c/, a QAT run r/ and a recovery run l/, all made from the model `m`."""
    run("build_kd_cache", "--model", "m", "--cache-dir", "c", *CACHE)
    run("train_qat", "--model", "m", "--cache-dir", "c", "--output-dir", "r", *QAT)
    run("train_recovery_lora", "--checkpoint", "r/best.pt", "--kd-cache-dir", "c", "--output-dir", "l", *SMALL)
    return here


def change(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def use_everything(run, model: str) -> None:
    """Run every script that uses the files of `made` with the model at another path, and resume r and l."""
    base = ["--model", model]
    run("measure_perplexity", *base, "--checkpoint", "r/best.pt", "--adapter", "l/adapter", *PPL)
    run("run_inference", *base, "--checkpoint", "r/best.pt", "--compare", "--prompt", "A", "--max-new-tokens", 2,
        "--device", "cpu")  # fmt: skip
    run("run_legal_assistant", *base, "--checkpoint", "r/best.pt", "--adapter", "l/adapter", "--question", "A?",
        "--max-new-tokens", 2, "--device", "cpu")  # fmt: skip
    run("build_kd_cache", *base, "--cache-dir", "c", *CACHE)
    again = [*base, "--resume", "auto"]
    for folder in ("r", "l"):
        with open(f"{folder}/summary.json") as file:
            finished = file.read()
        with pytest.raises(SystemExit):
            script = (
                ["train_qat", "--cache-dir", "./c", *QAT]
                if folder == "r"
                else ["train_recovery_lora", "--v2-checkpoint", "./r/best.pt", "--kd-cache-dir", "./c", *SMALL]
            )
            run(*script, "--output-dir", folder, *again)
        with open(f"{folder}/summary.json") as file:
            assert file.read() == finished
    run("report_recovery", *base, "--qat-run", "r", "--recovery-run", "l", "--cache-dir", "c", "--rows", 4,
        "--new-tokens", 2, "--device", "cpu")  # fmt: skip
    run("export_model", *base, "--checkpoint", "r/best.pt", "--adapter", "l/adapter", "--format", "hf",
        "--output-dir", f"exports/{model.replace('/', '_')}")  # fmt: skip
    run("train_qat", *base, "--cache-dir", "c", "--from", "r/best.pt", "--mlp", "int4/g32", "--dry-run", *SMALL)
    run("train_recovery_lora", *base, "--checkpoint", "r/best.pt", "--kd-cache-dir", "c", "--dry-run", *SMALL)


def test_a_model_is_recognised_under_another_spelling_of_its_path_and_after_moving(
    run, refuse, made, tmp_path_factory, monkeypatch
):
    use_everything(run, "./m")
    load_adapters_from_elsewhere(made, tmp_path_factory.mktemp("elsewhere"), monkeypatch)
    (made / "m").rename(made / "moved")
    use_everything(run, str(made / "moved"))
    message = refuse("measure_perplexity", "--checkpoint", "r/best.pt", *PPL)
    assert "which cannot be read" in message and "--model" in message
    change(made / "moved")
    base = ["--model", "moved"]
    for script, *flags in (
        ("measure_perplexity", *base, "--checkpoint", "r/best.pt", *PPL),
        ("build_kd_cache", *base, "--cache-dir", "c", *CACHE),
        ("train_qat", *base, "--cache-dir", "c", "--output-dir", "r", "--resume", "auto", *QAT),
        ("train_qat", *base, "--cache-dir", "c", "--output-dir", "new", "--from", "r/best.pt", *SMALL),
        ("export_model", *base, "--checkpoint", "r/best.pt", "--output-dir", "new"),
        ("train_recovery_lora", *base, "--checkpoint", "r/best.pt", "--kd-cache-dir", "c", "--output-dir", "new",
         *SMALL),
    ):  # fmt: skip
        message = refuse(script, *flags)
        assert "m'" in message and "'moved'" in message and ("ingerprint" in message or "base is" in message)
    assert not (made / "new").exists()
    (made / "moved").rename(made / "m")
    assert "which has changed since" in refuse("measure_perplexity", "--checkpoint", "r/best.pt", *PPL)


def test_files_without_fingerprints_still_load(run, refuse, made, tiny_tokenizer, capsys):
    content = torch.load("r/best.pt", weights_only=True)
    del content["fingerprint"]
    content["model"] = "m"
    torch.save(content, "old.pt")
    manifest = json.loads((made / "c" / "manifest.json").read_text())
    del manifest["teacher_fingerprint"]
    (made / "c" / "manifest.json").write_text(json.dumps(manifest))
    facts = json.loads((made / "r" / "manifest.json").read_text())
    del facts["base"]
    (made / "r" / "manifest.json").write_text(json.dumps(facts))
    assert read_manifest(made / "c")[0].teacher == "m"

    again = ["--cache-dir", "c", "--output-dir", "r", "--resume", "auto", *QAT]
    with pytest.raises(SystemExit):  # it is finished, so the run was recognised
        run("train_qat", "--model", "m", *again)
    for flags in ([], ["--model", "m"], ["--model", "./m"]):
        run("measure_perplexity", "--checkpoint", "old.pt", *flags, *PPL)
    assert "note:" not in capsys.readouterr().out
    run("build_kd_cache", "--model", "m", "--cache-dir", "c", *CACHE)

    (made / "m").rename(made / "moved")
    run("measure_perplexity", "--checkpoint", "old.pt", "--model", "moved", *PPL)
    assert "has no fingerprint of its base model 'm'" in capsys.readouterr().out
    assert "model is 'm' there" in refuse("train_qat", "--model", "moved", *again)
    assert "teacher is 'm'" in refuse("build_kd_cache", "--model", "moved", "--cache-dir", "c", *CACHE)

    LlamaForCausalLM(LlamaConfig.from_pretrained("moved", num_hidden_layers=3)).save_pretrained("other")
    tiny_tokenizer.save_pretrained("other")
    with pytest.raises(UserError, match="does not fit model 'other'"):
        read_student("old.pt", "other")


# -- adapters --------------------------------------------------------------------------------------------------------
def load_adapters_from_elsewhere(made, elsewhere, monkeypatch):
    """Load the adapters of recovery and of the export with only PEFT, from another working directory."""
    with monkeypatch.context() as patch:
        patch.chdir(elsewhere)
        for folder in (made / "l", made / "exports" / "._m"):
            adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
            assert isinstance(adapted, PeftModel)
        student, _ = load_student(made / "r" / "best.pt")
        weight = adapted.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
        assert torch.equal(weight, student.model.layers[0].mlp.up_proj.weight)


def test_an_adapter_of_a_full_precision_model_recognises_that_model(run, refuse, here):
    model = add_adapter(load_model("m"), 4, 8, ("q",), 0)
    save_adapter(model, here / "adapter", None)
    (here / "m").rename(here / "moved")
    flags = ["--model", "moved", "--adapter", "adapter", *PPL]
    run("measure_perplexity", *flags)
    change(here / "moved")
    message = refuse("measure_perplexity", *flags)
    assert "trained on another model (fingerprint" in message and "moved" in message
    (here / "adapter" / "origin.json").unlink()  # as from other programs: nothing records the base model
    run("measure_perplexity", *flags)


# -- nothing is left behind ------------------------------------------------------------------------------------------
def odd_models(folder):
    """{name: part of the message} of models that are refused, made in `folder` from m/."""

    def copied(name):
        return shutil.copytree(folder / "m", folder / name)

    config = json.loads((folder / "m" / "config.json").read_text())
    (copied("unknown") / "config.json").write_text(json.dumps(config | {"model_type": "foo"}))
    (copied("layers") / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(folder / "m" / "model.safetensors")
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(untied, copied("untied") / "model.safetensors", {"format": "pt"})
    (copied("both") / "adapter_config.json").write_text("{}")
    for file in copied("mute").glob("token*"):
        file.unlink()
    with open(copied("cut") / "model.safetensors", "r+b") as file:
        file.truncate(50_000)
    return {
        "unknown": "does not know", "layers": "does not describe", "untied": "tie_word_embeddings",
        "both": "and an adapter", "mute": "has no tokenizer", "cut": "damaged",
    }  # fmt: skip


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_refused_model_leaves_nothing_behind(run, refuse, here, cache, dry):
    for name, part in odd_models(here).items():
        assert part in refuse("build_kd_cache", "--model", name, "--cache-dir", "new", *CACHE, *dry)
        flags = ["--model", name, "--cache-dir", cache, "--output-dir", "run", *SMALL]
        assert part in refuse("train_qat", *flags, *dry)
    assert not (here / "new").exists() and not (here / "run").exists() and not (here / "runs").exists()
