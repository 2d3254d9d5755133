"""A run resumes if its training stays the same: on another day, with updates split differently, with other
evaluations."""

import gc
import itertools
import json
import shutil
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from records import curve, lines, summary
from small import CPU, SMALL

from qat_lora.errors import UserError
from qat_lora.run import report, resuming
from qat_lora.run.session import Session

DATED = """
{{- 'Today is ' + strftime_now('%d %b %Y') + '.\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
LAW = "--count 60 --length 512 --epochs 0.2 --batch-size 2 --accumulation-steps 1 --lora-r 4 --eval-answers 0 "
LAW += "--final-answers 0 --max-prompt-length 300 --max-new-tokens 4 --save-every 1 --log-every 1"
LAW = [*LAW.split(), *CPU]
BOB = "--num-samples 8 --epochs 1 --batch-size 2 --num-generations 2 --max-prompt-length 200 --max-completion-length 4 "
BOB += "--validation-samples 1 --save-every 1 --log-every 1 --sft --sft-epochs 1"
BOB = [*BOB.split(), *CPU]
EVERY = ["--save-every", 1, "--eval-every", 1, "--log-every", 1, "--resume", "auto"]


@pytest.fixture
def dated(sharp_model_dir, tmp_path):
    """The tiny model with a chat template that prints the date."""
    folder = shutil.copytree(sharp_model_dir, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text(DATED)
    return folder


@pytest.fixture
def another_day(monkeypatch):
    """another_day(): move the clock of the project and of transformers five days ahead."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(time.time() + 5 * 86400, tz)

    def begin():
        monkeypatch.setattr(resuming, "datetime", Later)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)

    return begin


@pytest.fixture
def die(run, monkeypatch):
    """die(script, *flags): run, and die in the third update."""

    def dying(*flags) -> None:
        record, calls = Session.record, itertools.count(1)

        def deadly(self, **metrics):
            if next(calls) == 3:
                raise KeyboardInterrupt
            record(self, **metrics)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, "record", deadly)
            run(*flags)
        gc.collect()  # the process would end here, and release its run directory

    return dying


# -- a template that prints the date ---------------------------------------------------------------------------------
@pytest.mark.parametrize("script, flags", [("train_cot_sft", LAW), ("train_musclebob_improved", BOB)])
def test_resume_auto_resumes_a_run_with_a_date_in_its_text_on_another_day(
    run, die, dated, tmp_path, another_day, monkeypatch, script, flags
):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", dated, *flags, "--resume", "auto"]
    die(script, *flags)
    another_day()
    run(script, *flags)
    (found,) = (tmp_path / "runs" / script).iterdir()
    assert summary(found)["status"] == "finished"


def test_a_cache_with_a_date_in_its_text_resumes_on_another_day(run, dated, tmp_path, another_day):
    row = {"messages": [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 80)
    text = ["--dataset", tmp_path / "rows.jsonl", "--length", 32, "--rows-per-shard", 8]
    flags = ["--model", dated, *text, *CPU, "--cache-dir"]
    run("build_kd_cache", *flags, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cache")
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    last = sorted(manifest["shards"])[-1]
    del manifest["shards"][last]
    (tmp_path / "cache" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "cache" / last).unlink()
    another_day()
    run("build_kd_cache", *flags, tmp_path / "cache")
    assert (tmp_path / "cache" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


# -- the same update, split differently; other evaluation and saving -------------------------------------------------
def test_the_legal_fine_tune_resumes_with_another_split_and_other_evaluations(
    run, die, sharp_model_dir, sharp_cache, tmp_path
):
    same = ["--epochs", 0.4, "--accumulation-steps", 2, "--lora-dropout", 0]  # dropout follows the split
    fixed = ["--model", sharp_model_dir, *LAW, *same, "--anchor-cache", sharp_cache]
    run("train_cot_sft", *fixed, "--output-dir", tmp_path / "whole")
    flags = [*fixed, "--output-dir", tmp_path / "run", "--resume", "auto"]
    die("train_cot_sft", *flags)
    other = ["--no_gradient_checkpointing", "--keep", 3, "--eval-every", 2, "--answer-rows", 3, "--save-every", 3]
    run("train_cot_sft", *flags, "--batch-size", 1, "--accumulation-steps", 4, *other)
    assert curve(tmp_path / "run", "loss") == pytest.approx(curve(tmp_path / "whole", "loss"), rel=1e-4)
    anchor = [curve(tmp_path / name, "anchor_kl") for name in ("run", "whole")]
    assert anchor[0] == pytest.approx(anchor[1], abs=1e-4) and len(anchor[1]) > 1
    changed = json.loads((tmp_path / "run" / "manifest.json").read_text())["resumed"][0]["changed"]
    assert changed["batch_size"] == 1 and changed["keep"] == 3 and "learning_rate" not in changed
    with pytest.raises(UserError, match=r"rows_per_update .* is 4 there"):
        run("train_cot_sft", *flags, "--batch-size", 1)


@pytest.mark.parametrize("script", ["train_qat", "train_recovery_lora"])
def test_low_bit_training_resumes_with_another_split_and_other_evaluations(
    run, die, qat, tiny_student, cache, tmp_path, script
):
    start = ["--checkpoint", tiny_student, "--kd-cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
    flags = [*(qat if script == "train_qat" else start), "--max-steps", 4, *EVERY]
    die(script, *flags)
    run(script, *flags, "--batch-size", 2, "--accumulation-steps", 2, "--eval-rows", 6, "--save-every", 2)
    found = [line for line in lines(tmp_path / "run") if "heldout_kl" in line]
    assert {line["heldout_rows"] for line in found} == {4, 6}
    best = min(line["heldout_kl"] for line in found if line["heldout_rows"] == 6)
    assert summary(tmp_path / "run")["best"]["heldout_kl"] == best


def test_a_given_learning_rate_must_be_given_again(run, die, qat, tmp_path):
    flags = [*qat, "--max-steps", 4, *EVERY]
    die("train_qat", *flags, "--learning-rate", 3e-4)
    with pytest.raises(UserError, match=r"learning_rate is 0\.0003 there, None here"):
        run("train_qat", *flags)


# -- the files of a run ----------------------------------------------------------------------------------------------
def holds_its_best(folder: Path) -> bool:
    """Whether best.pt has the best figure that the run reports."""
    info = torch.load(folder / "best.pt", weights_only=True)["info"]
    return info["heldout_kl"] == summary(folder)["best"]["heldout_kl"]


def test_best_checkpoint_and_figure_agree_after_evaluation_changes_and_changes_back(run, die, qat, tmp_path):
    flags = [*qat, "--max-steps", 6, *EVERY, "--learning-rate", 3]
    die("train_qat", *flags, "--eval-rows", 4)
    die("train_qat", *flags, "--eval-rows", 6)
    run("train_qat", *flags, "--eval-rows", 4)
    assert holds_its_best(tmp_path / "run")


def test_a_run_may_be_killed_after_its_last_step(run, qat, tmp_path, monkeypatch):
    flags = [*qat, "--resume", "auto"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report, "write_report", Mock(side_effect=KeyboardInterrupt))
        run("train_qat", *flags)
    assert not (tmp_path / "run" / "plots").exists()
    run("train_qat", *flags, "--eval-rows", 3)
    assert (tmp_path / "run" / "plots" / "metrics.png").exists() and holds_its_best(tmp_path / "run")
    assert summary(tmp_path / "run")["status"] == "finished"


def test_a_failed_plot_does_not_fail_the_run(run, qat, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_report", Mock(side_effect=RuntimeError("no fonts")))
    run("train_qat", *qat)
    assert "warning: writing the report failed (no fonts)" in capsys.readouterr().out
    assert summary(tmp_path / "run")["status"] == "finished"
