"""A run is resumed only with the same config and the same inputs, whatever their paths are."""

import pytest
import yaml
from locked import locked
from toy_runs import Config, config, manifest_of, opened, refusal, resumed

from qat_lora.errors import UserError
from qat_lora.run.resuming import begun
from qat_lora.run.rundir import open_run

pytestmark = pytest.mark.usefixtures("here")


# -- the date that a chat template prints ----------------------------------------------------------------------------
def test_the_date_of_a_run_is_when_it_was_started():
    assert begun("toy", config(resume="auto")).microsecond == 0
    run = opened({"date": "2026-01-02T03:04:05"})
    assert begun("toy", config(resume="auto")).isoformat() == "2026-01-02T03:04:05"
    assert begun("toy", Config(resume="run")).isoformat() == "2026-01-02T03:04:05"
    assert begun("toy", config()).year >= 2026 and begun("toy", config()).isoformat() != "2026-01-02T03:04:05"
    manifest_of(run, date="yesterday")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        begun("toy", config(resume="auto"))


def test_auto_takes_the_date_of_the_run_with_the_fewest_other_options(clock):
    """Options that say where something is may differ: a model that was moved is still the same."""
    for day, limit, every, seed in ((1, 4, 10, 0), (2, 5, 10, 0), (3, 6, 20, 0), (4, 6, 20, 1)):
        opened({"date": f"2026-01-0{day}T00:00:00"}, output_dir=None, limit=limit, log_every=every, seed=seed)
    assert begun("toy", Config(resume="auto", limit=4)).day == 1
    assert begun("toy", Config(resume="auto", limit=7)).day == 2, "the newest of two with one other option"
    assert begun("toy", Config(resume="auto", limit=6)).day == 3
    assert begun("toy", Config(resume="auto", seed=1)).day == 4
    assert begun("toy", Config(resume="auto", limit=4, max_steps=11)).year >= 2026


def test_the_precision_in_use_is_compared_not_the_option():
    opened({"precision": "bf16"})
    assert resumed({"precision": "bf16"}, precision="bf16").resumed
    for asked in ("auto", "fp32"):
        said = refusal({"precision": "fp32"}, precision=asked)
        assert "precision is 'bf16'" in said and "'fp32'" in said


def test_a_run_of_another_format_is_refused_with_both_versions():
    manifest_of(opened(), format=7)
    assert "run is a run of format 7, and this version resumes format 4" in refusal(resume="auto")


# -- resuming --------------------------------------------------------------------------------------------------------
def test_resume_off_on_an_existing_run_is_refused_with_a_fix():
    opened()
    message = refusal(resume="off")
    assert "run already holds a run" in message and "--resume auto" in message and "--output-dir" in message


@pytest.mark.parametrize("file", ["metrics.jsonl", "notes.txt"])
def test_a_folder_with_other_files_is_refused(here, file):
    """Its files would be taken for those of this run."""
    (here / "run").mkdir()
    (here / "run" / file).write_text("")
    for resume in ("off", "auto"):
        assert f"run holds {file} but no manifest.json" in refusal(resume=resume)
    assert [path.name for path in (here / "run").iterdir()] == [file]


def test_the_folder_of_a_process_that_died_at_once_is_used(here):
    (here / "run").mkdir()
    for file in (".lock", "config.yaml", "manifest.json.part"):
        (here / "run" / file).write_text("")
    assert not resumed().resumed


def test_auto_resumes_in_the_output_dir_and_records_other_options():
    opened(log_every=10)
    again = resumed(device="cpu", log_every=3)
    assert again.resumed and str(again.path) == "run"
    (record,) = manifest_of(again)["resumed"]
    assert record["changed"] == {"log_every": 3}
    there = yaml.safe_load((again.path / "config.yaml").read_text())
    assert there["resume"] == "off" and there["log_every"] == 10, "as at the start"


@pytest.mark.parametrize("where", [{"resume": "auto"}, {"resume": "run", "output_dir": None}])
def test_another_config_is_refused_with_the_key_and_both_values(where):
    opened()
    message = refusal(max_steps=20, **where)
    assert "max_steps is 10 there, 20 here" in message and "--output-dir" in message


def test_resume_with_a_path_resumes_that_run():
    opened()
    assert str(resumed(resume="run", output_dir=None).path) == "run"
    assert "--output-dir other are different directories" in refusal(resume="run", output_dir="other")
    assert resumed(resume="run", output_dir="./run").resumed
    assert "--resume nowhere: no run there" in refusal(resume="nowhere", output_dir=None)


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "3", '{"loss": 1.0}'])
def test_a_damaged_line_of_metrics_is_named(line):
    run = opened()
    run.metrics_path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2 "):
        run.metrics()


def test_a_resumed_run_does_not_say_how_it_ended_before(clock):
    run = opened()
    run.finish("preempted")
    assert resumed().path == run.path and not (run.path / "summary.json").exists()


def test_auto_finds_the_newest_unfinished_run_of_this_config(clock, capsys):
    runs = [opened(output_dir=None) for _ in range(4)]
    other = opened(output_dir=None, seed=1)
    runs[3].finish("finished")
    runs[2].finish("preempted")
    assert resumed(output_dir=None).path == runs[2].path
    runs[2].finish("finished")
    assert resumed(output_dir=None).path == runs[1].path
    assert resumed(output_dir=None, seed=1).path == other.path
    assert "no unfinished run of this config" not in capsys.readouterr().out
    assert not open_run("other", Config(resume="auto"), {}).resumed
    assert "no unfinished run of this config" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.yaml", "summary.json"])
def test_auto_skips_a_damaged_run(clock, file):
    good = opened(output_dir=None)
    (opened(output_dir=None, seed=1).path / file).write_text("{")
    assert resumed(output_dir=None).path == good.path


def test_a_run_that_another_process_is_writing_is_refused_and_not_changed():
    run = opened()
    before = (run.path / "manifest.json").read_bytes()
    run.held.close()
    with locked(run.path):
        assert "another process is writing run" in refusal()
    assert (run.path / "manifest.json").read_bytes() == before
    assert resumed().resumed


def test_the_same_process_can_resume_a_run_that_was_interrupted():
    """As in a notebook, whose last traceback keeps everything alive."""
    interrupted = opened()
    assert resumed().resumed and interrupted.held.closed


@pytest.mark.parametrize(
    "file, damage",
    [
        ("config.yaml", lambda _: b""), ("config.yaml", lambda _: b"{"), ("config.yaml", lambda _: b"[]"),
        ("manifest.json", lambda _: b"{"), ("manifest.json", lambda _: b"[]"),
        ("config.yaml", lambda whole: b"\xff" + whole),
        ("config.yaml", lambda whole: whole.replace(b"log_every: 10", b"log_every: 19")),  # noticed by its checksum
    ],
)  # fmt: skip
def test_a_damaged_run_is_refused_with_the_name_of_the_file(file, damage):
    path = opened().path / file
    path.write_bytes(damage(path.read_bytes()))
    message = refusal()
    assert f"{file} is" in message and "damaged" in message


# -- inputs are compared by content, not by path ---------------------------------------------------------------------
def test_an_option_that_is_a_path_may_differ_if_the_fact_is_the_same():
    opened({"base": "f00"}, limit=1)
    assert resumed({"base": "f00", "heldout_rows": "not recorded by an older run"}, limit=2).resumed
    assert "base is 'f00' (limit 1) there (manifest.json), 'ba4' (limit 2) here" in refusal({"base": "ba4"}, limit=2)


def test_in_an_older_run_without_the_fact_the_option_must_be_the_same():
    opened(limit=1)
    assert "limit is 1 there, 2 here" in refusal({"base": "f00"}, limit=2)
    assert resumed({"base": "f00"}, limit=1).resumed


def test_auto_finds_a_run_whose_model_has_moved(clock):
    run = opened({"base": "f00"}, limit=1, output_dir=None)
    assert resumed({"base": "f00"}, limit=2, output_dir=None).path == run.path
    assert not resumed({"base": "ba4"}, limit=2, output_dir=None).resumed


def test_other_held_out_data_is_refused_with_the_option_of_the_data():
    opened({"base": "f00", "heldout_base": "1"}, limit=1)
    message = refusal({"base": "f00", "heldout_base": "2"}, limit=3)
    assert "heldout_base is '1' (limit 1) there (manifest.json), '2' (limit 3) here" in message


@pytest.mark.parametrize("ours", [{"a.json": "1", "b.json": "3"}, {"a.json": "1"}])
def test_a_fact_about_several_files_names_the_one_that_differs(ours):
    opened({"model files": {"a.json": "1", "b.json": "2"}})
    message = refusal({"model files": ours})
    assert f"model files: b.json is '2' there (manifest.json), {ours.get('b.json')!r} here" in message


def test_a_refused_value_names_the_preset():
    opened(config="mine.yaml")
    assert "preset (--config mine.yaml here)" in refusal(config="mine.yaml", max_steps=11)
