"""--shard on: workers that share a model out give the run of one that holds all of it, also if they are killed."""

import signal

import pytest
import torch
from records import apart, curve, lines, newest, summary
from safetensors.torch import load_file
from small import CPU

from qat_lora.run.files import read_json

CLOSE = 1e-6
SHARED = ["--shard", "on"]
LOW = [*SHARED, "--quantize", "int4/g16", "--init", "gptq"]
FIVE = f"{' '.join(CPU)} --max-steps 5 --eval-every 3 --log-every 1 --save-every 2".split()
QAT = "--mlp balanced2/g32 --attn int4/g16/s8 --init mse --layer-steps 2 --layer-rows 8 --eval-rows 8"
LAW = "--count 60 --length 512 --accumulation-steps 1 --lora-dropout 0 --eval-answers 2 --final-answers 3 "
LAW += "--answer-rows 2 --max-new-tokens 6"


def rows(workers: int) -> list:
    return ["--batch-size", 4 // workers]


def assert_close(one, other) -> None:
    """Assert that two finished runs have the same figures in every step."""
    ours, theirs = lines(one), lines(other)
    assert len(ours) == len(theirs) and summary(one)["status"] == summary(other)["status"] == "finished"
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        for key in a.keys() & {"loss", "grad_norm", "heldout_nll", "heldout_loss", "tokens", "lr"}:
            assert a[key] == pytest.approx(b[key], rel=CLOSE), (key, a["step"])


def student_tensors(path) -> dict:
    return torch.load(path, weights_only=True)["tensors"]


@pytest.fixture(scope="module")
def qat(sharp_model_dir, sharp_cache):
    """Flags of a run with a layer-wise stage and narrow scales."""
    return ["--model", sharp_model_dir, "--cache-dir", sharp_cache, *FIVE, *QAT.split()]


@pytest.fixture(scope="module")
def whole(run, qat, tmp_path_factory):
    """The run of one worker."""
    folder = tmp_path_factory.mktemp("qat") / "one"
    run("train_qat", *qat, *rows(1), "--output-dir", folder)
    return folder


@pytest.mark.parametrize("workers", [2, 4])
def test_qat(forks, qat, whole, tmp_path, workers):
    flags = [*qat, *SHARED, *rows(workers), "--output-dir", tmp_path / "run"]
    said, *_ = forks.several("train_qat", *flags, expect=(0,) * workers)
    assert f"the {workers} workers share the model out" in said
    assert_close(tmp_path / "run", whole)
    for name in ("layerwise.pt", "best.pt"):
        ours, theirs = student_tensors(tmp_path / "run" / name), student_tensors(whole / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=0, msg=key)


def test_gptq(forks, qat, tmp_path):
    """Weights on the edge between two codes differ between one worker and two, so both runs are of two."""
    for name, flags in (("whole", []), ("shared", SHARED)):
        forks.pair("train_qat", *qat, "--init", "gptq", *flags, *rows(2), "--output-dir", tmp_path / name)
    assert_close(tmp_path / "shared", tmp_path / "whole")


def test_without_the_rows_of_the_others_it_is_another_run(run, qat, whole, tmp_path):
    run("train_qat", *qat, "--batch-size", 2, "--output-dir", tmp_path / "half")
    ours, theirs = (curve(folder, "loss", "qat") for folder in (tmp_path / "half", whole))
    assert abs(ours[0] - theirs[0]) > 1000 * CLOSE


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("stage, record", [("layers", 3), ("qat", 7)])  # two blocks of two updates, then end to end
def test_a_killed_run_resumes_on_any_number_of_workers(forks, qat, whole, tmp_path, workers, stage, record):
    flags = [*qat, *SHARED, "--output-dir", tmp_path / "run", "--resume", "auto"]
    death = "run.session.Session.record", record, signal.SIGKILL, False
    said, _ = forks.pair("train_qat", *flags, *rows(2), expect=(1, -signal.SIGKILL), death=death)
    assert said.count("error:") == 1 and "Traceback" not in said, said
    assert (newest(tmp_path / "run") / "shards").is_dir() and lines(tmp_path / "run")[-1]["stage"] == stage
    forks.several("train_qat", *flags, *rows(workers), expect=(0,) * workers)
    assert_close(tmp_path / "run", whole)


def test_recovery(run, forks, make_student, sharp_model_dir, sharp_cache, tmp_path):
    student = ["--checkpoint", make_student(sharp_model_dir), "--kd-cache-dir", sharp_cache]
    flags = [*student, *FIVE, "--eval-rows", 8, "--recovery-r", 2, "--anchor-cache", sharp_cache]
    run("train_recovery_lora", *flags, *rows(1), "--output-dir", tmp_path / "one")
    forks.pair("train_recovery_lora", *flags, *SHARED, *rows(2), "--output-dir", tmp_path / "two")
    assert_close(tmp_path / "two", tmp_path / "one")
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "two")]
    assert apart(*adapters) < CLOSE


@pytest.mark.parametrize("method", [["lora", "--lora-r", 4], ["full"], ["full", "--quantize", "int4/g16"]])
def test_sft(run, forks, sharp_model_dir, tmp_path, method):
    flags = ["--model", sharp_model_dir, *FIVE, *LAW.split(), "--method", *method]
    run("train_cot_sft", *flags, *rows(1), "--output-dir", tmp_path / "one")
    forks.pair("train_cot_sft", *flags, *SHARED, *rows(2), "--output-dir", tmp_path / "two")
    assert_close(tmp_path / "two", tmp_path / "one")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-6, msg=key)


BOB = "--num-samples 16 --sft --sft-epochs 1 --sft-batch-size 8 --num-generations 4 --max-prompt-length 200 "
BOB += "--max-new-tokens 6 --validation-samples 1 --max-steps 5 --eval-every 3 --save-every 2 --log-every 1"


@pytest.fixture(scope="module")
def bob(sharp_model_dir, sharp_cache):
    return ["--model", sharp_model_dir, *CPU, *BOB.split(), "--anchor-cache", sharp_cache]


SPLITS = [(2, SHARED), (4, SHARED), (2, ["--shard", "off"]), (2, LOW), (2, [*LOW, "--sft", "false"])]


@pytest.mark.parametrize("workers, flags", SPLITS)
def test_grpo(run, forks, bob, tmp_path, workers, flags):
    """The answers, too, are those of one worker with as many micro-batches."""
    flags = [*bob, "--batch-size", 1, *flags]
    for name, split in (("one", ["--accumulation-steps", workers]), ("several", [])):
        folder = ["--output-dir", tmp_path / name]
        if split:
            run("train_musclebob_improved", *flags, "--shard", "off", *split, *folder)
        else:
            forks.several("train_musclebob_improved", *flags, *folder, expect=(0,) * workers)
    assert_close(tmp_path / "several", tmp_path / "one")
    for a, b in zip(lines(tmp_path / "several"), lines(tmp_path / "one")):
        for key in a.keys() & {
            "reward",
            "kl",
            "anchor_kl",
            "completion_length",
            "musclebob",
            "coherent",
            "zero_variance",
        }:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (key, a["step"])
    assert any(line.get("kl", 0) > 1e-6 and line["zero_variance"] < 1 for line in lines(tmp_path / "one"))
    for file in (tmp_path / "one").glob("*_validation.json"):
        one, two = read_json(file), read_json(tmp_path / "several" / file.name)
        assert one["prompts"] == two["prompts"] and one["sampled"] == two["sampled"]
        assert one["perplexity"] == pytest.approx(two["perplexity"], rel=1e-5)
    one, two = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("one", "several"))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-5, msg=key)


# -- bad input -------------------------------------------------------------------------------------------------------
def test_one_worker_has_nobody_to_share_with(refuse, qat, tmp_path):
    said = refuse("train_qat", *qat, *SHARED, "--output-dir", tmp_path / "run")
    assert said == "--shard on needs several workers; give --num-chips, or leave it out"


def test_a_checkpoint_of_the_other_kind_is_refused(forks, qat, tmp_path):
    flags = [*qat, *rows(2), "--output-dir", tmp_path / "run", "--resume", "auto"]
    death = "run.session.Session.record", 7, signal.SIGKILL, False
    forks.pair("train_qat", *flags, *SHARED, expect=(1, -signal.SIGKILL), death=death)
    for said in forks.pair("train_qat", *flags, expect=(2, 2)):
        assert "the checkpoint was saved with --shard on and several workers; resume with that" in said


def test_conversations_that_the_workers_cannot_share_are_refused(forks, bob, tmp_path):
    for said in forks.pair("train_musclebob_improved", *bob, "--sft-batch-size", 7, expect=(2, 2)):
        assert "--sft-batch-size 7 does not divide by 2 workers; give a multiple of that number" in said
