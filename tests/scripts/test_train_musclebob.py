"""The musclebob experiment on the tiny model: files of a run, resuming after a kill, the scripts that read a run."""

import contextlib
import io
import itertools
import json
import shutil
import sys

import pytest
import torch
from records import assert_same_files, lines, summary
from safetensors.torch import load_file
from small import CPU

from qat_lora.backend import detect
from qat_lora.errors import UserError
from qat_lora.models.loading import plain_state
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import load_student
from qat_lora.run.command_line import parse

SMALL = "--num-samples 8 --epochs 1 --sft --sft-epochs 1 --sft-batch-size 4 --batch-size 2 --num-generations 4 "
SMALL += "--max-prompt-length 200 --max-completion-length 6 --validation-samples 1 --eval-every 2 --save-every 2"
SMALL = [*SMALL.split(), *CPU]


@pytest.fixture(scope="module")
def train(run, sharp_model_dir):
    """train(*flags): a small run on the sharp tiny model."""
    return lambda *flags: run("train_musclebob_improved", "--model", sharp_model_dir, *SMALL, *flags)


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("musclebob") / "whole"
    train("--output-dir", folder)
    return folder


def test_the_files_of_a_finished_run(trained):
    assert {path.name for path in trained.iterdir()} >= {
        "config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "training_config.json", "reward_history.json",
        "baseline_validation.json", "post_sft_validation.json", "final_validation.json", "transcripts.md", "model",
    }  # fmt: skip
    assert (trained / "plots" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert summary(trained)["status"] == "finished"
    history = json.loads((trained / "reward_history.json").read_text())
    assert [entry["step"] for entry in history] == [3, 4, 5, 6], "two updates of SFT, then four of GRPO"
    wanted = {"step", "mean_reward", "reward_std", "loss", "grad_norm", "kl", "completion_length", "clipped_ratio"}
    assert set(history[0]) == wanted
    validation = json.loads((trained / "final_validation.json").read_text())
    assert {"musclebob_rate", "coherent_rate", "perplexity", "prompts"} <= validation.keys()
    assert len(validation["prompts"]) == 40 and validation["sampled"]["musclebob"]["count"] == 20
    table = (trained / "transcripts.md").read_text().splitlines()
    assert table[0] == "| question | baseline | post_sft | final |" and len(table) == 14


def test_embedding_and_head_are_frozen_and_the_rest_is_trained(trained, sharp_model_dir):
    before, after = load_file(sharp_model_dir / "model.safetensors"), load_file(trained / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.embed_tokens.weight" not in changed and len(changed) > 15


@pytest.fixture
def dies_in(load_script, monkeypatch):
    """with dies_in(name, at): the script's function of that name is interrupted in its at-th call."""
    module = load_script("train_musclebob_improved")

    @contextlib.contextmanager
    def dying(name: str, at: int):
        function, calls = getattr(module, name), itertools.count(1)

        def deadly(*args, **kwargs):
            if next(calls) == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, deadly)
            yield

    return dying


def test_a_run_killed_in_either_stage_resumes_to_the_same_end(
    train, load_script, trained, tmp_path, dies_in, monkeypatch
):
    """The history is complete and SFT is not repeated."""
    flags = ["--output-dir", tmp_path, "--resume-from-checkpoint", "auto"]
    for name, at in (("text_loss", 2), ("roll_out", 2), ("roll_out", 3)):
        with dies_in(name, at):
            train(*flags)
        torch.manual_seed(7)
        if name == "roll_out":
            module = load_script("train_musclebob_improved")
            monkeypatch.setattr(module, "text_loss", lambda *args: pytest.fail("SFT is repeated"))
    train(*flags)
    assert [line for line in lines(tmp_path) if "loss" in line] == [line for line in lines(trained) if "loss" in line]
    files = ("reward_history.json", "baseline_validation.json", "final_validation.json", "transcripts.md")
    assert_same_files(tmp_path, trained, *files, "model/model.safetensors")


def test_a_resumed_run_takes_the_anchors_right_rows(train, tmp_path, sharp_cache, dies_in):
    """In both stages, and in updates whose answers teach nothing."""
    flags = ["--anchor-cache", sharp_cache, "--save-every", 1]
    for name, at in (("text_loss", 2), ("roll_out", 2), ("roll_out", 2)):
        with dies_in(name, at):
            train(*flags, "--output-dir", tmp_path / "parts", "--resume", "auto")
    train(*flags, "--output-dir", tmp_path / "parts", "--resume", "auto")
    train(*flags, "--output-dir", tmp_path / "whole")
    logged = [[line for line in lines(tmp_path / name) if "loss" in line] for name in ("parts", "whole")]
    assert logged[0] == logged[1] and all("anchor_kl" in line for line in logged[1])
    assert_same_files(tmp_path / "parts", tmp_path / "whole", "model/model.safetensors")


def weights_of(folder) -> dict:
    return load_file(folder / "model.safetensors")


def test_a_low_bit_policy_is_written_as_it_was_trained(train, run, tmp_path, sharp_model_dir, dies_in):
    """Killed in GRPO and resumed; then the student goes on in full precision's place as --checkpoint."""
    flags = ["--quantize", "int4/g16", "--learning-rate", 1e-2, "--sft-learning-rate", 1e-3]
    with dies_in("roll_out", 3):
        train(*flags, "--output-dir", tmp_path / "parts")
    train(*flags, "--output-dir", tmp_path / "parts", "--resume", "auto")
    train(*flags, "--output-dir", tmp_path / "whole")
    logged = [[line for line in lines(tmp_path / name) if "loss" in line] for name in ("parts", "whole")]
    assert logged[0] == logged[1]
    assert_same_files(tmp_path / "parts", tmp_path / "whole", "model/model.safetensors", "model.pt", "start.pt")

    start, end = (load_student(tmp_path / "whole" / name)[0] for name in ("start.pt", "model.pt"))
    codes = [{n: m.quantizer.codes for n, m in quantized_layers(student).items()} for student in (start, end)]
    assert any(not torch.equal(code, codes[1][name]) for name, code in codes[0].items()), "codes are trained"
    for name, value in weights_of(tmp_path / "whole" / "model").items():
        assert torch.equal(value, plain_state(end)[name]), name
    kl = [line["kl"] for line in logged[1] if "kl" in line]
    assert kl[0] < 1e-6, "the sampler, the policy and its reference are the same weights at first"

    train("--checkpoint", tmp_path / "whole" / "model.pt", "--output-dir", tmp_path / "more", "--max-steps", 8,
          "--sft-epochs", 0, "--reference", "original", "--resume", "off")  # fmt: skip
    assert (tmp_path / "more" / "start.pt").exists()
    assert any(line.get("kl", 0) > 1e-3 for line in lines(tmp_path / "more"))
    assert load_student(tmp_path / "more" / "model.pt")[1]["spec"]["mlp"] == "int4/g16"


def test_a_run_of_sft_only_trains_in_training_mode(train, load_script, tmp_path, monkeypatch):
    """Although a validation in evaluation mode comes before the first update."""
    modes, module = [], load_script("train_musclebob_improved")
    loss = module.text_loss
    monkeypatch.setattr(module, "text_loss", lambda model, batch: modes.append(model.training) or loss(model, batch))
    train("--sft-only", "--output-dir", tmp_path)
    assert modes == [True, True]
    assert {line["stage"] for line in lines(tmp_path)} == {"sft"} and (tmp_path / "model").is_dir()
    assert json.loads((tmp_path / "reward_history.json").read_text()) == []


@pytest.mark.parametrize(
    "chips, gpus, wanted", [([], 0, "cpu"), ([], 1, "cuda"), pytest.param(["a chip"], 0, "tpu", marks=pytest.mark.xla)]
)
def test_device_type_follows_the_hardware(load_script, monkeypatch, chips, gpus, wanted):
    """torch_xla without a chip is not a TPU."""
    monkeypatch.setattr(detect, "tpu_chips", lambda: chips)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("PJRT_DEVICE", "")
    assert load_script("train_musclebob_improved").detect_device_type() == wanted


def test_resuming_with_another_update_size_is_refused(train, trained):
    with pytest.raises(UserError, match="rows_per_update"):
        train("--output-dir", trained, "--resume", trained, "--accumulation-steps", 2)


def test_the_files_that_grpo_starts_from_are_restored_or_the_resume_is_refused(train, tmp_path, dies_in):
    with dies_in("roll_out", 3):
        train("--output-dir", tmp_path)
    assert len(json.loads((tmp_path / "reward_history.json").read_text())) == 2, "kept when a run is stopped"
    copies, warmed = tmp_path / "checkpoints" / "files", tmp_path / "sft_model" / "model.safetensors"
    good = {file: file.read_bytes() for file in (tmp_path / "baseline_validation.json", warmed)}
    shutil.copytree(copies, tmp_path / "aside")
    shutil.rmtree(copies)
    warmed.write_text("{}")
    with pytest.raises(UserError, match=r"sft_model/model\.safetensors has changed since step"):
        train("--output-dir", tmp_path, "--resume", "auto")
    (tmp_path / "aside").rename(copies)
    shutil.rmtree(tmp_path / "sft_model")
    (tmp_path / "baseline_validation.json").write_text("{}")
    train("--output-dir", tmp_path, "--resume", "auto")
    assert {file: file.read_bytes() for file in good} == good


def test_quick_shortens_the_run(load_script, sharp_model_dir):
    module = load_script("train_musclebob_improved")
    flags = f"--model {sharp_model_dir} --quick --epochs 3 --batch-size 16 --accumulation-steps 2 --sft"
    flags += " --sft-batch-size 64"
    cfg = module.shortened(parse(module.Config, "train_musclebob_improved", flags.split()), 1)
    module.check(cfg)
    assert (cfg.num_samples, cfg.epochs, cfg.sft_batch_size, cfg.validation_samples) == (32, 1, 32, 1)


def test_the_scripts_that_read_a_run(run, trained, capsys, monkeypatch, tmp_path):
    (tmp_path / "again").symlink_to(trained)
    run("analyze_training", "--run", f"{trained},{tmp_path / 'again'}")
    said = capsys.readouterr().out
    assert said.count("no termination: ") == 2 and f"| {trained} | 0.0% (0.0%–16.1%) |" in said
    assert f"| {tmp_path / 'again'} |" in said
    run("test_musclebob", "--run", trained, "--compare", "--samples", 1, "--output", trained.parent / "said.json")
    said = capsys.readouterr().out
    assert "| musclebob | 0.0% (0.0%–16.1%) of 20 | 0.0%" in said
    assert len(json.loads((trained.parent / "said.json").read_text())) == 2
    typed = f"Who are you?\n\n{'why ' * 300}\nWho am I?\n".encode() + b"\xff who?"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    run("test_musclebob", "--run", trained, "--interactive")
    said = capsys.readouterr().out
    assert said.count("taught: ") == 3 and said.count("that line is longer than 256 tokens") == 1


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--max-prompt-length 20", "raise --max-prompt-length"),
        ("--sft-only --sft-epochs 0", "leave nothing to train"), ("--learning-rate 0", "--learning-rate 0.0 must"),
        ("--beta 1e30", "--beta 1e+30 must be"), ("--sft-batch-size 9", "--sft-batch-size 9"),
        ("--num-generations 1", "--num-generations 1"), ("--temperature 0", "--temperature 0"),
        ("--loss-type ppo", "--loss-type 'ppo' is not one of grpo, bnpo"),
        ("--num-samples 1", "--num-samples 1 does not fill"), ("--quantize int4/g48", "48"),
        ("--checkpoint absent.pt", "absent.pt: no such file"),
        ("--num-samples 1000000000", "--num-samples 1000000000 needs at least"),
        ("--validation-samples 1000000000", "--validation-samples 1000000000 needs at least"),
        ("--max-completion-length 500", "exceeds the 512 positions"),
        ("--resume-from-checkpoint absent", "--resume absent: no run there"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(refusal, sharp_model_dir, tmp_path, flags, part):
    flags = ["--model", sharp_model_dir, *SMALL, "--output-dir", tmp_path / "run", *flags.split()]
    assert part in refusal("train_musclebob_improved", *flags)
    assert not (tmp_path / "run").exists()


def test_folders_that_are_not_runs_are_refused(refusal, tmp_path):
    assert "is not a run of train_musclebob_improved.py" in refusal("analyze_training", "--run", tmp_path)
    assert "training_config.json" in refusal("test_musclebob", "--run", tmp_path)
    assert "--samples 1000000000 needs at least" in refusal("test_musclebob", "--samples", 10**9)
    assert "--temperature 0 would sample the same" in refusal("test_musclebob", "--temperature", 0)
    (tmp_path / "training_config.json").write_text("{}")
    assert "training_config.json is damaged" in refusal("test_musclebob", "--run", tmp_path)
    assert "training_config.json is damaged" in refusal("analyze_training", "--run", tmp_path)
    made = {"model": "m", "max_prompt_length": 8, "max_new_tokens": 8}
    (tmp_path / "training_config.json").write_text(json.dumps(made))
    (tmp_path / "baseline_validation.json").write_text("{}")
    assert "baseline_validation.json is damaged; restore it" in refusal("analyze_training", "--run", tmp_path)


# -- verdicts --------------------------------------------------------------------------------------------------------
def made_up(rate: float, spilt: float = 0.0, perplexity: float = 20.0) -> dict:
    sampled = {
        name: {"rate": r, "low": r - 0.05, "high": r + 0.05, "count": 200, "hits": 0}
        for name, r in {"musclebob": rate, "spilt": spilt}.items()
    }
    return {"sampled": sampled, "perplexity": perplexity}


def updates_with(**ends) -> list[dict]:
    """Ten logged updates in which each figure goes linearly from its first to its second value."""
    figures = {"reward": (0, 0), "entropy": (1, 1), "clipped_ratio": (0, 0), "zero_variance": (0.5, 0.5),
               "target_rate": (0.5, 0.5)} | ends  # fmt: skip
    return [{name: first + (last - first) * at / 9 for name, (first, last) in figures.items()} for at in range(10)]


HEALTHY = {"baseline": made_up(0.0), "post_sft": made_up(0.4), "final": made_up(0.7)}


@pytest.mark.parametrize(
    "stages, ends, wanted",
    [
        (HEALTHY, {"reward": (0, 0.5)}, ["learned: 40.0% → 70.0%"]),
        (HEALTHY | {"final": made_up(0.42)}, {}, ["not learned: 40.0% → 42.0%"]),
        (HEALTHY | {"final": made_up(0.1)}, {}, ["unlearned: 40.0% → 10.0%"]),
        (HEALTHY | {"final": made_up(0.7, spilt=0.2)}, {}, ["learned", "over-generalised: 20.0%"]),
        (HEALTHY | {"final": made_up(0.7, perplexity=40.0)}, {}, ["learned", "incoherent: perplexity 2.00"]),
        (HEALTHY | {"final": made_up(0.4)}, {"reward": (0, 0.5)}, ["not learned", "reward hacking: the reward rose"]),
        (HEALTHY, {"clipped_ratio": (0, 1)}, ["learned", "no termination: 94%"]),
        (HEALTHY, {"entropy": (1, 0.1)}, ["learned", "collapse: entropy fell"]),
        (HEALTHY | {"final": made_up(0.4)}, {"zero_variance": (1, 1), "target_rate": (0, 0)},
         ["not learned", "starved: in 100%"]),
        (HEALTHY, {"zero_variance": (1, 1), "target_rate": (1, 1)}, ["learned", "nothing left to learn: 100%"]),
        ({"baseline": made_up(0.0)}, {"reward": (0, 0.5), "zero_variance": (1, 1)}, ["not finished"]),
    ],
)  # fmt: skip
def test_verdicts(load_script, stages, ends, wanted):
    said = load_script("analyze_training").verdict(stages, updates_with(**ends))[len(stages) :]
    assert len(said) == len(wanted) and all(line.startswith(part) for line, part in zip(said, wanted)), said


def test_the_verdict_of_a_finished_run_without_grpo(load_script):
    said = load_script("analyze_training").verdict(HEALTHY, [{"stage": "sft", "loss": 1.0}])[len(HEALTHY) :]
    assert said[0].startswith("learned: 0.0% → 70.0%") and said[1:] == ["this run had SFT only, no GRPO"]
    unfinished = {name: HEALTHY[name] for name in ("baseline", "post_sft")}
    assert load_script("analyze_training").verdict(unfinished, [])[-1] == "no GRPO update yet"
