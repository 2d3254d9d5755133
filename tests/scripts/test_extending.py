"""A larger --max-steps extends a finished run: its options are the run's, and its learning rate warms up and decays
again."""

import gc
import itertools
import json

import pytest
from records import curve, lines, newest, summary
from small import CPU, SMALL

from qat_lora.run.files import check_files
from qat_lora.run.session import Session

TWO = ["--max-steps", 2, "--warmup-steps", 1, "--log-every", 1]
LAW = "--count 60 --length 512 --batch-size 2 --accumulation-steps 1 --lora-r 4 --eval-answers 0 --final-answers 1 "
LAW += "--answer-rows 1 --max-new-tokens 4 --log-every 1 --max-steps 2 --warmup-ratio 0.5"
BOB = "--num-samples 8 --batch-size 2 --num-generations 2 --max-prompt-length 200 --max-completion-length 4 "
BOB += "--validation-samples 1 --log-every 1 --sft --sft-epochs 1 --max-steps 2"
STORIES = "--tokenizer chars --heldout-fraction 0.2 --batch-size 4 --block-size 32 --embedding 16 --hidden 24 "
STORIES += "--reservoirs diagonal:12 --dropout 0.1"
PUZZLES = "puzzle=sudoku4 puzzles=60 heldout_fraction=0.2 global_batch_size=8 lr_warmup=1 log_interval=1 steps=2 "
PUZZLES += "halt_max_segments=3 arch.num_heads=2 arch.hidden_size=16 arch.L_cycles=2 compile=off device_type=cpu "
PUZZLES += "forward_dtype=float32"


@pytest.fixture
def flags_of(cache, tiny_model_dir, tiny_student, sharp_model_dir, tmp_path):
    """The flags of a run of two updates in its last stage, by script."""
    text = tmp_path / "text.txt"
    text.write_text("Tom had a red hat. He put it on. <|endoftext|>" * 60)
    return {
        "train_qat": ["--model", tiny_model_dir, "--cache-dir", cache, *SMALL, *TWO, "--layer-steps", 1],
        "train_recovery_lora": ["--checkpoint", tiny_student, "--kd-cache-dir", cache, *SMALL, *TWO],
        "train_cot_sft": ["--model", sharp_model_dir, *LAW.split(), *CPU],
        "train_musclebob_improved": ["--model", sharp_model_dir, *BOB.split(), *CPU],
        "train_tinystories_reservoir": ["--dataset", text, *STORIES.split(), *TWO, *CPU],
        "pretrain": PUZZLES.split(),
    }


@pytest.fixture
def finished(run, flags_of, tmp_path):
    """finished(script): the folder of such a run."""

    def make(script: str, name: str = "run"):
        run(script, *flags_of[script], "--output-dir", tmp_path / name)
        return tmp_path / name

    return make


SCRIPTS = [
    "train_qat", "train_recovery_lora", "train_cot_sft", "train_musclebob_improved", "train_tinystories_reservoir",
    "pretrain",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_extended(script, run, finished, capsys):
    folder = finished(script)
    before, last = lines(folder), lines(folder)[-1]["stage"]
    capsys.readouterr()
    run(script, "--resume", folder, "--max-steps", 5)
    said = capsys.readouterr().out
    assert f"extending {folder} from 2 to 5 updates; the learning rate warms up and decays again over the added" in said
    assert lines(folder)[: len(before)] == before and summary(folder)["status"] == "finished"
    check_files(folder, *json.loads((folder / "checksums.json").read_text()))
    rates = curve(folder, "lr", last)
    assert len(rates) == 5 and rates[2] < rates[3] > rates[4], "a second period"
    (extended,) = json.loads((folder / "manifest.json").read_text())["extended"]
    assert extended["max_steps"] == 5 and extended["done"] == 2 and "decays again" in extended["schedule"]
    with pytest.raises(SystemExit) as end:
        run(script, "--resume", folder)
    assert end.value.code == 0


@pytest.mark.parametrize("died", [1, 2])
def test_an_extension_that_is_killed_goes_on_to_the_same_bits(run, finished, monkeypatch, died):
    whole, killed = finished("train_qat", "whole"), finished("train_qat", "killed")
    run("train_qat", "--resume", whole, "--max-steps", 5, "--save-every", 1)
    record, calls = Session.record, itertools.count(1)

    def deadly(self, **metrics):
        if next(calls) == died:
            raise KeyboardInterrupt
        record(self, **metrics)

    more = ["--resume", killed, "--max-steps", 5, "--save-every", 1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "record", deadly)
        run("train_qat", *more)
    gc.collect()  # the process would end here, and release its run directory
    run("train_qat", *more)
    assert lines(killed) == lines(whole)
    (extended,) = json.loads((killed / "manifest.json").read_text())["extended"]
    assert extended["max_steps"] == 5


def test_the_answers_of_an_extended_run_are_those_of_its_new_model(run, finished):
    folder = finished("train_musclebob_improved")
    files = [folder / "model" / "model.safetensors", folder / "final_validation.json", folder / "transcripts.md"]
    before = [file.stat().st_mtime_ns for file in files]
    run("train_musclebob_improved", "--resume", folder, "--max-steps", 3)
    assert all(file.stat().st_mtime_ns > old for file, old in zip(files, before))


def test_fewer_updates_than_a_run_has_had_are_refused(refuse, finished):
    folder = finished("train_recovery_lora")
    said = refuse("train_recovery_lora", "--resume", folder, "--max-steps", 1)
    assert f"--max-steps 1: {folder} has had 2 updates already; give more than 2 to extend it" in said
    assert summary(folder)["status"] == "finished"


@pytest.mark.parametrize("file", ["model.safetensors", "meta.json"])
def test_a_damaged_last_checkpoint_is_replaced_by_the_one_before(run, finished, file):
    whole, damaged = finished("train_qat", "whole"), finished("train_qat", "damaged")
    for folder in (whole, damaged):
        run("train_qat", "--resume", folder, "--max-steps", 4, "--save-every", 1)
    (newest(damaged) / file).write_bytes(b"[]")
    for folder in (whole, damaged):
        run("train_qat", "--resume", folder, "--max-steps", 6)
    assert all(curve(damaged, name) == curve(whole, name) for name in ("loss", "lr"))


@pytest.mark.parametrize("damage", [lambda more: more[0].update(after=1), lambda more: more.insert(0, 3)])
def test_a_damaged_record_of_an_extension_is_refused(run, refuse, finished, damage):
    folder = finished("train_recovery_lora")
    run("train_recovery_lora", "--resume", folder, "--max-steps", 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    damage(manifest["extended"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    said = refuse("train_recovery_lora", "--resume", folder, "--max-steps", 4)
    assert "damaged (checksum), or the extensions in manifest.json are; restore them" in said
    assert summary(folder)["status"] == "finished"


def test_resume_names_a_run_of_this_script(refuse, finished, tmp_path):
    folder = finished("train_recovery_lora")
    assert f"--resume {tmp_path}/none: no run there" in refuse("train_qat", "--resume", tmp_path / "none")
    said = refuse("train_qat", "--resume", folder, "--max-steps", 4)
    assert f"--resume {folder} is a run of train_recovery_lora.py, not of train_qat.py" in said


# -- a result as the start of another run ----------------------------------------------------------------------------
FIGURES = {
    "train_tinystories_reservoir": "heldout_ppl",
    "pretrain": "heldout_loss",
    "train_recovery_lora": "heldout_kl",
}
RESULTS = {"train_recovery_lora": "--adapter", "train_tinystories_reservoir": "--start", "pretrain": "--start"}


@pytest.mark.parametrize("script", RESULTS)
def test_the_result_of_a_run_is_a_start(script, run, finished, flags_of):
    folder = finished(script)
    start = [RESULTS[script], folder / "adapter" if script == "train_recovery_lora" else folder]
    other = folder.with_name("other")
    run(script, *flags_of[script], *start, "--output-dir", other)
    figures = [curve(path, FIGURES[script]) for path in (folder, other)]
    assert figures[1][0] == pytest.approx(min(figures[0]), rel=1e-5)
    assert len(json.loads((other / "manifest.json").read_text())["start"]) == 64


@pytest.mark.parametrize(
    "script, flags, said",
    [
        ("train_recovery_lora", ["--lora-r", 4], "has r 8, and this run 4; use the adapter's"),
        ("train_recovery_lora", ["--targets", "attn"], "has other layers: "),
        ("train_recovery_lora", ["--adapter-init", "error"], "both set the initial values; give one"),
        (
            "train_tinystories_reservoir",
            ["--seed", 5],
            "was trained with --seed 0, and this run has 5; use the same value",
        ),
        (
            "train_tinystories_reservoir",
            ["--embedding", 32],
            "was trained with --embedding 16, and this run has 32; use",
        ),
        ("pretrain", ["--hidden-size", 32], "was trained with hidden_size 16, and this run has 32; use"),
    ],
)
def test_a_start_of_other_sizes_is_refused(script, flags, said, refuse, finished, flags_of):
    folder = finished(script)
    start = [RESULTS[script], folder / "adapter" if script == "train_recovery_lora" else folder]
    other = folder.with_name("other")
    assert said in refuse(script, *flags_of[script], *start, *flags, "--output-dir", other)
    assert not other.exists()


def test_a_story_with_a_letter_that_the_start_does_not_know_is_refused(refuse, finished, flags_of, tmp_path):
    folder = finished("train_tinystories_reservoir")
    (tmp_path / "text.txt").write_text("A zebra. <|endoftext|>" * 60)
    start = [*flags_of["train_tinystories_reservoir"], "--start", folder, "--output-dir", tmp_path / "other"]
    assert "the run's tokenizer has no token for 'A'" in refuse("train_tinystories_reservoir", *start)


def test_a_damaged_value_in_the_config_of_a_run_is_named_with_its_file(refuse, finished):
    folder = finished("train_recovery_lora")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 2\n", "max_steps: two\n"))
    said = refuse("train_recovery_lora", "--resume", folder, "--max-steps", 4)
    assert f"{config}: max_steps: 'two' is not an int; correct the value" in said
