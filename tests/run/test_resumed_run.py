"""A run is resumed only with the same config and the same inputs, whatever their paths are."""

import dataclasses
import gc
import json
from dataclasses import dataclass
from datetime import UTC

import pytest
import yaml
from locked import locked
from toy_runs import Config, begun_with, config, ended, refusal

from qat_lora.errors import UserError
from qat_lora.run.options import RunConfig, option
from qat_lora.run.resuming import begun
from qat_lora.run.rundir import open_run

pytestmark = pytest.mark.usefixtures("here")

RESUMED = b', "resumed": 3}'


# -- the date that a chat template prints ----------------------------------------------------------------------------
def test_the_date_of_a_run_is_when_it_was_started(here):
    assert begun("toy", config(resume="auto")).microsecond == 0
    open_run("toy", config(), {"date": "2026-01-02T03:04:05"}).held.close()
    assert begun("toy", config(resume="auto")).isoformat() == "2026-01-02T03:04:05"
    assert begun("toy", Config(resume="run")).isoformat() == "2026-01-02T03:04:05"
    assert begun("toy", config()).year >= 2026 and begun("toy", config()).isoformat() != "2026-01-02T03:04:05"


def test_auto_takes_the_date_of_the_newest_run_of_this_config(clock):
    for day, seed in ((1, 0), (2, 0), (3, 1)):
        open_run("toy", Config(seed=seed), {"date": f"2026-01-0{day}T00:00:00"}).held.close()
    assert begun("toy", Config(resume="auto")).day == 2
    assert begun("toy", Config(resume="auto", seed=1)).day == 3


def test_auto_takes_the_date_of_the_run_with_the_fewest_other_options(clock):
    """Options that say where something is may differ: a model that was moved is still the same."""
    for day, limit, every in ((1, 4, 10), (2, 5, 10), (3, 6, 20)):
        open_run("toy", Config(limit=limit, log_every=every), {"date": f"2026-01-0{day}T00:00:00"}).held.close()
    assert begun("toy", Config(resume="auto", limit=4)).day == 1
    assert begun("toy", Config(resume="auto", limit=7)).day == 2, "the newest of two with one other option"
    assert begun("toy", Config(resume="auto", limit=6)).day == 3
    assert begun("toy", Config(resume="auto", limit=4, max_steps=11)).year >= 2026


def test_the_precision_in_use_is_compared_not_the_option():
    open_run("toy", config(), {"precision": "bf16"}).held.close()
    assert open_run("toy", config(resume="auto", precision="bf16"), {"precision": "bf16"}).resumed
    for asked in ("auto", "fp32"):
        with pytest.raises(UserError, match=r"precision is 'bf16' .* there .*, 'fp32' .* here"):
            open_run("toy", config(resume="auto", precision=asked), {"precision": "fp32"})


def test_a_run_of_an_earlier_version_has_the_date_when_it_was_started():
    run = begun_with()
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["started"] = "20260102T120000Z"
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    assert begun("toy", config(resume="auto")).astimezone(UTC).isoformat() == "2026-01-02T12:00:00+00:00"


def test_a_damaged_date_is_refused_by_name():
    open_run("toy", config(), {"date": "yesterday"}).held.close()
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        begun("toy", config(resume="auto"))


def test_a_run_with_a_renamed_default_is_the_same_run(tmp_path):
    """A run with --targets q,v,o,gate,up,down, an older default, resumes with that value and with auto."""

    @dataclass(frozen=True, kw_only=True)
    class Adapter(RunConfig):
        targets: str = option("auto", "layers", renamed={"q,v,o,gate,up,down": "auto"})

    old = Adapter(targets="q,v,o,gate,up,down", output_dir=str(tmp_path / "run"))
    open_run("test", old, {}).finish("preempted")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["targets"] == old.targets
    assert open_run("test", dataclasses.replace(old, targets="auto", resume="auto"), {}).resumed
    assert open_run("test", dataclasses.replace(old, resume="auto"), {}).resumed
    with pytest.raises(UserError, match="targets is 'q,v,o,gate,up,down' there, 'q,v' here"):
        open_run("test", dataclasses.replace(old, targets="q,v", resume="auto"), {})


# -- resuming --------------------------------------------------------------------------------------------------------
def test_resume_off_on_an_existing_run_is_refused_with_a_fix():
    open_run("toy", config(), {})
    message = refusal(config())
    assert "run already holds a run" in message and "--resume auto" in message and "--output-dir" in message


@pytest.mark.parametrize("file", ["metrics.jsonl", "model", "baseline_validation.json", "notes.txt"])
def test_a_folder_with_other_files_is_refused(here, file):
    """Its files would be taken for those of this run."""
    (here / "run").mkdir()
    (here / "run" / file).write_text("")
    for resume in ("off", "auto"):
        assert f"run holds {file} but no manifest.json" in refusal(config(resume=resume))
    assert [path.name for path in (here / "run").iterdir()] == [file]


def test_the_folder_of_a_process_that_died_at_once_is_used(here):
    (here / "run").mkdir()
    for file in (".lock", "config.yaml", "manifest.json.part"):
        (here / "run" / file).write_text("")
    assert not open_run("toy", config(resume="auto"), {}).resumed


def test_auto_resumes_in_the_output_dir_and_records_it():
    open_run("toy", config(), {})
    again = open_run("toy", config(resume="auto", device="cpu"), {})
    assert again.resumed and str(again.path) == "run"
    assert len(json.loads((again.path / "manifest.json").read_text())["resumed"]) == 1
    assert yaml.safe_load((again.path / "config.yaml").read_text())["resume"] == "off"  # as at the start


def test_auto_starts_a_run_in_a_directory_without_one():
    assert not open_run("toy", config(resume="auto"), {}).resumed


@pytest.mark.parametrize("resume", ["auto", "run"])
def test_another_config_is_refused_with_the_key_and_both_values(resume):
    open_run("toy", config(), {})
    output = "run" if resume == "auto" else None
    message = refusal(config(max_steps=20, resume=resume, output_dir=output))
    assert "max_steps is 10 there, 20 here" in message and "--output-dir" in message


def test_a_run_of_an_earlier_version_that_lacks_an_option_is_refused():
    """Its manifest has no checksum of config.yaml, so a missing option may have been lost."""
    path = begun_with().path
    there = yaml.safe_load((path / "config.yaml").read_text())
    del there["seed"]
    (path / "config.yaml").write_text(yaml.safe_dump(there))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["config_sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    message = refusal(config(resume="auto"))
    assert "config.yaml has no seed" in message and "damaged" in message


def test_resume_with_a_path_resumes_that_run():
    open_run("toy", config(), {})
    assert str(open_run("toy", Config(resume="run"), {}).path) == "run"


def test_resume_with_a_path_and_another_output_dir_is_refused():
    open_run("toy", config(), {})
    assert "--output-dir other are different directories" in refusal(config(resume="run", output_dir="other"))
    assert open_run("toy", config(resume="run", output_dir="./run"), {}).resumed


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "3", '{"loss": 1.0}'])
def test_a_damaged_line_of_metrics_is_named(line):
    run = open_run("toy", config(), {})
    run.metrics_path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2 "):
        run.metrics()


def test_resume_with_a_path_without_a_run_is_refused():
    message = refusal(Config(resume="nowhere"))
    assert "--resume nowhere" in message and "manifest.json" in message


def test_auto_finds_the_newest_unfinished_run_of_this_config(clock):
    runs = [ended(Config()) for _ in range(4)]
    other = ended(Config(seed=1))
    runs[3].finish("finished")
    runs[2].finish("preempted")
    assert open_run("toy", Config(resume="auto"), {}).path == runs[2].path
    runs[2].finish("finished")
    assert open_run("toy", Config(resume="auto"), {}).path == runs[1].path
    assert open_run("toy", Config(resume="auto", seed=1), {}).path == other.path
    assert not open_run("other", Config(resume="auto"), {}).resumed


def test_auto_says_when_it_starts_a_new_run(clock, capsys):
    open_run("toy", Config(), {}).finish("finished")
    assert not open_run("toy", Config(resume="auto"), {}).resumed
    assert "no unfinished run of this config" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.yaml", "summary.json"])
def test_auto_skips_a_damaged_run(clock, file):
    good = ended(Config())
    (ended(Config(seed=1)).path / file).write_text("{")
    assert open_run("toy", Config(resume="auto"), {}).path == good.path


def test_a_run_that_another_process_is_writing_is_refused_and_not_changed(here):
    run = open_run("toy", config(), {})
    before = (run.path / "manifest.json").read_bytes()
    run.held.close()
    with locked(run.path):
        assert "another process is writing run" in refusal(config(resume="auto"))
    assert (run.path / "manifest.json").read_bytes() == before
    assert open_run("toy", config(resume="auto"), {}).resumed


def test_the_same_process_can_resume_a_run_that_was_interrupted(here):
    """As in a notebook, whose last traceback keeps everything alive."""
    interrupted = open_run("toy", config(), {})
    assert open_run("toy", config(resume="auto"), {}).resumed
    assert interrupted.held.closed


@pytest.mark.parametrize("file", ["config.yaml", "manifest.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_run_is_refused_with_the_name_of_the_file(file, text):
    run = ended(config())
    (run.path / file).write_text(text)
    assert file in refusal(config(resume="auto"))


@pytest.mark.parametrize(
    "file, damage",
    [("config.yaml", lambda whole: b"\xff" + whole), ("manifest.json", lambda whole: whole[:-2] + RESUMED)],
)
def test_a_partly_damaged_run_is_refused_with_the_name_of_the_file(file, damage):
    path = ended(config()).path / file
    path.write_bytes(damage(path.read_bytes()))
    assert f"{file} is" in (said := refusal(config(resume="auto"))) and "damaged" in said


# -- inputs are compared by content, not by path ---------------------------------------------------------------------
def test_an_option_that_is_a_path_may_differ_if_the_fact_is_the_same():
    open_run("toy", config(limit=1), {"base": "f00"})
    assert open_run("toy", config(limit=2, resume="auto"), {"base": "f00"}).resumed


def test_another_fact_is_refused_with_both_values():
    open_run("toy", config(limit=1), {"base": "f00"})
    with pytest.raises(UserError) as error:
        open_run("toy", config(limit=2, resume="auto"), {"base": "ba4"})
    assert "base is 'f00' (limit 1) there (manifest.json), 'ba4' (limit 2) here" in str(error.value)


def test_in_an_older_run_without_the_fact_the_option_must_be_the_same():
    open_run("toy", config(limit=1), {})
    with pytest.raises(UserError) as error:
        open_run("toy", config(limit=2, resume="auto"), {"base": "f00"})
    assert "limit is 1 there, 2 here" in str(error.value)
    del error
    gc.collect()  # here the process would end
    assert open_run("toy", config(limit=1, resume="auto"), {"base": "f00"}).resumed


def test_auto_finds_a_run_whose_model_has_moved(clock):
    run = open_run("toy", Config(limit=1), {"base": "f00"})
    run.held.close()
    assert open_run("toy", Config(limit=2, resume="auto"), {"base": "f00"}).path == run.path
    assert not open_run("toy", Config(limit=2, resume="auto"), {"base": "ba4"}).resumed


def test_other_held_out_data_is_refused_with_the_option_of_the_data():
    ended_with = open_run("toy", config(limit=1), {"base": "f00", "heldout_base": "1"})
    ended_with.held.close()
    with pytest.raises(
        UserError, match=r"heldout_base is '1' \(limit 1\) there \(manifest\.json\), '2' \(limit 3\) here"
    ):
        open_run("toy", config(limit=3, resume="auto"), {"base": "f00", "heldout_base": "2"})


def test_a_refused_value_names_the_preset():
    ended(config(config="mine.yaml"))
    assert "preset (--config mine.yaml here)" in refusal(config(config="mine.yaml", resume="auto", max_steps=11))


def test_a_run_that_calls_the_uniform_codebook_lut_is_the_same_run(here):
    @dataclass(frozen=True, kw_only=True)
    class Quantised(RunConfig):
        mlp: str = option("none", "quantiser")

    def made(mlp: str, fact: str, resume: str = "off"):
        return open_run("toy", Quantised(output_dir="run", mlp=mlp, resume=resume), {"student": fact})

    made("lut4/r32", "mlp=lut4/r32 attn=none").held.close()
    made("uniform4/r32", "mlp=uniform4/r32 attn=none", "auto").held.close()
    with pytest.raises(UserError, match="mlp is 'lut4/r32' there, 'uniform2/r32' here"):
        made("uniform2/r32", "mlp=uniform2/r32 attn=none", "auto")
