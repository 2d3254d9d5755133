"""The script of the reservoir LM on a small text: files of a run, resuming after a kill, workers, fallbacks."""

import io
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from records import apart, assert_same_files, curve, lines, newest, summary

from qat_lora.errors import UserError
from qat_lora.experiments.stories import evaluation as stories
from qat_lora.run.command_line import parse

SMALL = "--tokenizer chars --heldout-fraction 0.2 --epochs 2 --batch-size 4 --block-size 32 --embedding 16 --hidden 24 "
SMALL += "--reservoirs diagonal:12,esn:8 --spectral-radius 0.9 --density 0.4 --attention-window 8 --learning-rate 1e-2 "
SMALL += "--warmup-steps 2 --dropout 0 --eval-every 5 --save-every 5 --log-every 1 --device cpu --precision fp32"
SMALL = SMALL.split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "stories.jsonl"
    texts = (f"Tom had {n} cats. He gave one to Ann and kept {n - 1}." for n in range(1, 33))
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The folder for cached tokens in these tests."""
    return tmp_path_factory.mktemp("tokens") / "stories"


@pytest.fixture(scope="module")
def train(run, load_script, text, cache):
    """train(*flags): the script's main, on the small text."""

    def main(*flags) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_script("train_tinystories_reservoir"), "CACHE", cache)
            run("train_tinystories_reservoir", "--dataset", text, *SMALL, *flags)

    return main


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tale") / "run"
    train("--output-dir", folder)
    return folder


def test_the_files_of_a_finished_run(trained):
    there = {path.name for path in trained.iterdir()}
    assert there >= {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "best.pt", "tokenizer.json"}
    assert (trained / "samples.txt").read_text().count("\n---\n") == 2
    assert curve(trained, "loss")[-1] < 0.75 * curve(trained, "loss")[0]
    measured = curve(trained, "heldout_nll")
    assert summary(trained)["status"] == "finished" and summary(trained)["heldout_nll"] == min(measured) < measured[0]
    best = torch.load(trained / "best.pt", weights_only=True)
    assert summary(trained)["trained_parameters"] == sum(value.numel() for value in best.values())
    assert not any("reservoirs" in name for name in best), "reservoirs are not trained"


def test_a_run_killed_twice_resumes_to_the_same_end(train, trained, tmp_path, dies_at):
    for update in (4, 8):  # before the first checkpoint, and after it
        with dies_at(update):
            train("--output-dir", tmp_path, "--resume", "auto")
        torch.manual_seed(7)
        (tmp_path / "best.pt").write_text("of nobody")  # the best state is in the checkpoint
    train("--output-dir", tmp_path, "--resume", "auto")
    assert lines(tmp_path) == lines(trained)
    assert_same_files(tmp_path, trained, "best.pt", "samples.txt")


def test_two_workers_equal_one(train, forks, trained, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = tmp_path / "two"
    said, _ = forks.pair("train_tinystories_reservoir", "--dataset", text, *SMALL, "--output-dir", two)
    folders = [path for path in (tmp_path / "caches" / "stories").iterdir() if path.is_dir()]
    assert len(folders) == 1, "both workers read the same tokens"
    assert said.count("run directory") == 1 and "4 × 32 tokens (2 rows per worker)" in said
    for one, other in zip(lines(two), lines(trained), strict=True):
        assert one.pop("stage") == other.pop("stage") and one == pytest.approx(other, rel=1e-4)
    assert apart(*(newest(folder) / "model.safetensors" for folder in (two, trained))) < 1e-5
    shutil.rmtree(newest(two))
    (two / "summary.json").unlink()
    train("--output-dir", two, "--resume", "auto")  # one worker resumes the run of two
    assert lines(two)[-1]["heldout_nll"] == pytest.approx(lines(trained)[-1]["heldout_nll"], rel=1e-4)


@pytest.mark.parametrize("model", ["transformer", "mingru"])
def test_baselines_train_too(train, tmp_path, model):
    train("--model", model, "--output-dir", tmp_path)
    measured = curve(tmp_path, "heldout_nll")
    assert min(measured) < 0.9 * measured[0]


@pytest.mark.xla
def test_batch_and_learning_rate_on_tpu_are_in_the_resolved_config(load_script):
    module = load_script("train_tinystories_reservoir")
    cfg = parse(module.Config, "train_tinystories_reservoir", ["--batch-size", "64", "--learning-rate", "1e-3"])
    there = module.resolved(cfg, "xla")
    assert (there.global_batch_size, there.learning_rate) == (128, pytest.approx(1.2e-3))
    here = module.resolved(cfg, "cpu")
    assert (here.global_batch_size, here.learning_rate) == (64, 1e-3)


def test_a_dry_run_caches_no_tokens_and_a_run_caches_them(train, tmp_path, cache, capsys):
    (tmp_path / "tales.txt").write_text("\n<|endoftext|>\n".join(f"Tom had {n} cats and a dog." for n in range(30)))
    before = set(cache.glob("[!.]*"))
    train("--dataset", tmp_path / "tales.txt", "--dry-run")
    assert "30 stories" in capsys.readouterr().out and set(cache.glob("[!.]*")) == before
    for run in ("run", "other"):
        train("--dataset", tmp_path / "tales.txt", "--epochs", 1, "--output-dir", tmp_path / run)
    assert capsys.readouterr().out.count("tokenising") == 1 and len(set(cache.glob("[!.]*")) - before) == 1


# -- devices ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "there, gpus, reason, device",
    [(False, 1, "torch_xla not installed", "cuda"), (True, 0, "no TPU chip found", "cpu")],
)
def test_fallback_warnings_are_those_of_the_guide(monkeypatch, capsys, there, gpus, reason, device):
    monkeypatch.setattr(stories.importlib.util, "find_spec", lambda name: there or None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(stories, "tpu_chips", list)
    assert stories.get_device(use_tpu=True) == device
    warning = f"Warning: TPU requested but {reason}. Falling back to GPU.\n"
    assert capsys.readouterr().out == f"{warning}Using device: {device} (TPU=No)\n"


@pytest.mark.xla
def test_a_present_tpu_is_used(monkeypatch, capsys):
    monkeypatch.setattr(stories, "tpu_chips", lambda: ["chip"])
    assert stories.get_device(use_tpu=True) == "tpu" and "Using device: tpu (TPU=Yes)" in capsys.readouterr().out


def test_the_tpu_check_passes_and_can_fail(load_script, monkeypatch, capsys):
    module = load_script("test_tpu_support")
    cfg = parse(module.Config, "test_tpu_support", ["--device", "cpu"])
    module.main(cfg)
    said = capsys.readouterr().out
    assert said.count("ok ") == 6 and "All checks passed on cpu (" in said and "no TPU here" in said
    monkeypatch.setattr(module, "on_tpu", lambda batch, rate: (batch, rate))
    with pytest.raises(UserError, match="batch and learning rate on TPU"):
        module.main(cfg)
    assert "FAILED  batch and learning rate on TPU" in capsys.readouterr().out


# -- bad input -------------------------------------------------------------------------------------------------------
READS = ("--dataset", "--tokenizer", "--heldout-fraction", "--max-stories")  # options of the text
READS += ("--batch-size 999", "--epochs 999999999", "--block-size 5000")  # that depend on its size


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--block-size 5000", "--block-size 5000"), ("--block-size 99999", "65536 steps of a scan"),
        ("--density 1.5", "--density 1.5 must be above 0 and at most 1"), ("--heads 3", "--heads 3"),
        ("--tokenizer words", "--tokenizer 'words' is not one of"), ("--reservoirs esn:²", "is not KIND:UNITS"),
        ("--reservoirs loop:8", "'loop' is not one of"), ("--leak-min 0", "--leak-min 0.0 and --leak-max 1.0"),
        ("--batch-size 999", "--global-batch-size 999 is more than the 39 rows"),
        ("--epochs 999999999", "--epochs 999999999 makes"),
        ("--batch-size 3 --num-chips 2 --dry-run", "-batch-size 3 does not divide by 2 workers"),
        ("--temperature 1e-300", "temperature 1e-300"), ("--heldout-fraction 1", "--heldout-fraction 1"),
        ("--dataset absent.txt", "absent.txt"), ("--num-chips 99", "--num-chips 99"), ("--top-k -1", "top-k -1"),
        ("--tokenizer bpe --vocab-size 99999999999999", "--vocab-size 99999999999999"),
        ("--num-chips -2 --dry-run", "--num-chips -2"), ("--max-stories 0", "--max-stories 0 must"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(train, load_script, tmp_path, monkeypatch, flags, part):
    """All but READS are refused before the text is read."""
    if not flags.startswith(READS):
        unread = Mock(side_effect=AssertionError("the text is read"))
        monkeypatch.setattr(load_script("train_tinystories_reservoir"), "load_stories", unread)
    with pytest.raises(UserError) as error:
        train("--output-dir", tmp_path / "run", *flags.split())
    assert part in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# -- telling stories -------------------------------------------------------------------------------------------------
def test_stories_are_told_from_a_run(run, trained, capsys, monkeypatch):
    flags = ["tell_stories", "--run", trained, "--device", "cpu", "--precision", "fp32", "--length", 20]
    run(*flags, "--prompt", "Tom had", "--seed", 1)
    told = capsys.readouterr().out.split("\n", 1)[1]
    assert told.startswith("Tom had") and len(told) > len("Tom had\n\n")
    run(*flags, "--prompt", "Tom had", "--seed", 1)
    assert capsys.readouterr().out.split("\n", 1)[1] == told
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom had\n\nqué\n"))
    run(*flags, "--temperature", 0)
    first, second, *_ = capsys.readouterr().out.split("\n", 1)[1].split("\n\n")
    assert first.startswith("Tom had") and second


def test_a_text_is_measured_as_the_run_measures_its_own(run, trained, text, tmp_path, capsys):
    rows = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    heldout = tmp_path / "heldout.txt"
    heldout.write_text("<|endoftext|>".join(rows[-6:]))
    run("tell_stories", "--run", trained, "--device", "cpu", "--precision", "fp32", "--measure", heldout)
    said = capsys.readouterr().out
    assert f"bits   {summary(trained)['bits_per_byte']:.4f} bits per byte" in said


def test_stories_cannot_be_told_from_bad_input(refusal, trained, tmp_path):
    flags = ["tell_stories", "--device", "cpu", "--run"]
    (tmp_path / "odd.txt").write_text("Tom ∞")
    (tmp_path / "empty.txt").write_text(" ")
    assert "no such run directory" in refusal(*flags, tmp_path / "none")
    assert "holds no best.pt" in refusal(*flags, tmp_path)
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "best.pt").write_bytes(b"x")
    assert "best.pt has changed" in refusal(*flags, copy)
    for more, part in [
        (["--prompt", "∞"], "no token for '∞'"), (["--measure", tmp_path / "odd.txt"], "no token for '∞'"),
        (["--measure", tmp_path / "empty.txt"], "holds no text"), (["--measure", "a", "--prompt", "b"], "leave one of"),
        (["--measure", tmp_path / "none.txt"], "no such file"), (["--temperature", "-1"], "temperature -1.0"),
    ]:  # fmt: skip
        assert part in refusal(*flags, trained, *more)
