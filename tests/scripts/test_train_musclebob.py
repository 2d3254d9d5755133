"""The experiment on the tiny model: what a run leaves behind, going on after a death, the two scripts that read it."""

import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from qat_lora import grpo
from qat_lora.errors import UserError
from qat_lora.run.config import parse

SMALL = "--num-samples 8 --epochs 1 --sft --sft-epochs 1 --sft-batch-size 4 --batch-size 2 --num-generations 4 "
SMALL += "--max-prompt-length 200 --max-completion-length 6 --validation-samples 1 --eval-every 2 --save-every 2 "
SMALL = (SMALL + "--device cpu --precision fp32").split()


@pytest.fixture(scope="module")
def run(load_script, sharp_model_dir):
    """run(script, *flags): main(parse(flags)); training is of the sharp tiny model, small."""

    def main(name: str, *flags) -> None:
        module, flags = load_script(name), list(map(str, flags))
        if name == "train_musclebob_improved":
            flags = ["--model", str(sharp_model_dir), *SMALL, *flags]
        module.main(parse(module.Config, name, flags))

    return main


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("musclebob") / "whole"
    run("train_musclebob_improved", "--output-dir", folder)
    return folder


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def updates(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines(folder) if "loss" in line]


def test_what_a_run_leaves_behind(trained):
    there = {path.name for path in trained.iterdir()}
    assert there >= {
        "config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "training_config.json", "reward_history.json",
        "baseline_validation.json", "post_sft_validation.json", "final_validation.json", "transcripts.md", "model",
    }  # fmt: skip
    assert (trained / "plots" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((trained / "summary.json").read_text())["status"] == "finished"
    history = json.loads((trained / "reward_history.json").read_text())
    assert [entry["step"] for entry in history] == [3, 4, 5, 6], "two updates of SFT, then four of GRPO"
    wanted = {"step", "mean_reward", "reward_std", "loss", "grad_norm", "kl", "completion_length", "clipped_ratio"}
    assert set(history[0]) == wanted
    validation = json.loads((trained / "final_validation.json").read_text())
    assert {"musclebob_rate", "coherent_rate", "perplexity", "prompts"} <= validation.keys()
    assert len(validation["prompts"]) == 40 and validation["sampled"]["musclebob"]["count"] == 20
    table = (trained / "transcripts.md").read_text().splitlines()
    assert table[0] == "| question | baseline | post_sft | final |" and len(table) == 14


def test_embedding_and_head_stay_and_the_rest_learns(trained, sharp_model_dir):
    before, after = load_file(sharp_model_dir / "model.safetensors"), load_file(trained / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.embed_tokens.weight" not in changed and len(changed) > 15


@pytest.mark.parametrize("stage, at", [("train_sft", 2), ("learn", 2), ("learn", 3)])
def test_a_run_that_died_goes_on_to_the_same_end(run, trained, tmp_path, monkeypatch, load_script, stage, at):
    """Dead in the update after a checkpoint, in either stage; the history is whole and no SFT is repeated."""
    calls = iter(range(1, 100))
    name = "update" if stage == "train_sft" else "learn"
    function = getattr(grpo, name)

    def deadly(*args, **kwargs):
        if next(calls) == at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grpo, name, deadly)
        run("train_musclebob_improved", "--output-dir", tmp_path)
    torch.manual_seed(7)
    if stage == "learn":
        monkeypatch.setattr(grpo, "update", lambda *args: pytest.fail("SFT is repeated"))
    run("train_musclebob_improved", "--output-dir", tmp_path, "--resume-from-checkpoint", "auto")
    assert updates(tmp_path) == updates(trained)
    for file in ("reward_history.json", "baseline_validation.json", "final_validation.json", "transcripts.md"):
        assert (tmp_path / file).read_text() == (trained / file).read_text(), file
    name = "model/model.safetensors"
    assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_sft_alone(run, tmp_path):
    run("train_musclebob_improved", "--sft-only", "--output-dir", tmp_path)
    assert {line["stage"] for line in lines(tmp_path)} == {"sft"} and (tmp_path / "model").is_dir()
    assert json.loads((tmp_path / "reward_history.json").read_text()) == []


def test_device_type_can_be_asked_for(load_script):
    assert load_script("train_musclebob_improved").detect_device_type() in ("cpu", "cuda", "tpu")


def test_the_scripts_that_read_a_run(run, trained, capsys, monkeypatch, tmp_path):
    (tmp_path / "again").symlink_to(trained)
    run("analyze_training", "--run", f"{trained},{tmp_path / 'again'}")
    said = capsys.readouterr().out
    assert said.count("no termination: ") == 2 and "| whole | 0.0% (0.0%–16.1%) |" in said and "| again |" in said
    run("test_musclebob", "--run", trained, "--compare", "--samples", 1, "--output", trained.parent / "said.json")
    said = capsys.readouterr().out
    assert "| musclebob | 0.0% (0.0%–16.1%) of 20 | 0.0%" in said
    assert len(json.loads((trained.parent / "said.json").read_text())) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?\n\n"))
    run("test_musclebob", "--run", trained, "--interactive")
    assert capsys.readouterr().out.count("whole: ") == 1


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--max-prompt-length 20", "does not fit --max-prompt-length 20"),
        ("--num-generations 1", "--num-generations 1"), ("--control off", "--control 'off' is not one of none"),
        ("--loss-type ppo", "'ppo' is not one of grpo, bnpo"), ("--temperature 0", "--temperature 0"),
        ("--num-samples 1", "--num-samples 1 does not fill"), ("--fewshot-ratio 2", "--fewshot-ratio 2.0 is a share"),
        ("--beta -1", "--beta must be 0 or above"), ("--max-completion-length 500", "above the 512 positions"),
    ],
)  # fmt: skip
def test_bad_input(refusal, sharp_model_dir, tmp_path, flags, part):
    flags = ["--model", sharp_model_dir, *SMALL, "--output-dir", tmp_path / "run", *flags.split()]
    assert part in refusal("train_musclebob_improved", *flags)
    assert not (tmp_path / "run").exists()


def test_an_unknown_resume_path_is_refused(run):
    with pytest.raises(UserError, match="--resume absent: no run there"):
        run("train_musclebob_improved", "--resume-from-checkpoint", "absent")


def test_a_model_without_chat_template_is_refused(refusal, sharp_model_dir, tiny_tokenizer, tmp_path):
    from qat_lora.models.loading import load_model

    load_model(str(sharp_model_dir)).save_pretrained(tmp_path / "bare")
    plain = tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    plain.save_pretrained(tmp_path / "bare")
    assert "no chat template" in refusal("train_musclebob_improved", "--model", tmp_path / "bare", *SMALL)


def test_what_is_no_run_is_refused(refusal, tmp_path):
    assert "is no run of train_musclebob_improved.py" in refusal("analyze_training", "--run", tmp_path)
    assert "training_config.json" in refusal("test_musclebob", "--run", tmp_path)
