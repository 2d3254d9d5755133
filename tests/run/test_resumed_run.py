"""A run is continued only by the same config, over the same inputs, whatever they are called."""

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
def test_the_date_of_a_run_is_that_of_its_beginning(here):
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
    """Options that say where something is may differ: a model that has moved is the same."""
    for day, limit, every in ((1, 4, 10), (2, 5, 10), (3, 6, 20)):
        open_run("toy", Config(limit=limit, log_every=every), {"date": f"2026-01-0{day}T00:00:00"}).held.close()
    assert begun("toy", Config(resume="auto", limit=4)).day == 1
    assert begun("toy", Config(resume="auto", limit=7)).day == 2, "the newest of two with one other option"
    assert begun("toy", Config(resume="auto", limit=6)).day == 3
    assert begun("toy", Config(resume="auto", limit=4, max_steps=11)).year >= 2026


def test_the_precision_in_use_decides_not_how_it_was_asked_for():
    open_run("toy", config(), {"precision": "bf16"}).held.close()
    assert open_run("toy", config(resume="auto", precision="bf16"), {"precision": "bf16"}).resumed
    for asked in ("auto", "fp32"):
        with pytest.raises(UserError, match=r"precision is 'bf16' .* there .*, 'fp32' .* here"):
            open_run("toy", config(resume="auto", precision=asked), {"precision": "fp32"})


def test_a_run_of_an_earlier_version_was_begun_when_it_was_started():
    run = begun_with()
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["started"] = "20260102T120000Z"
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    assert begun("toy", config(resume="auto")).astimezone(UTC).isoformat() == "2026-01-02T12:00:00+00:00"


def test_a_damaged_date_is_refused_by_name():
    open_run("toy", config(), {"date": "yesterday"}).held.close()
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        begun("toy", config(resume="auto"))


def test_a_default_of_another_name_is_the_same_run(tmp_path):
    """A run of --targets q,v,o,gate,up,down, the default of older versions, is one of auto, and of itself."""

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
def test_off_on_an_existing_run_is_refused_with_the_mend():
    open_run("toy", config(), {})
    message = refusal(config())
    assert "run already holds a run" in message and "--resume auto" in message and "--output-dir" in message


@pytest.mark.parametrize("file", ["metrics.jsonl", "model", "baseline_validation.json", "notes.txt"])
def test_folder_with_something_else_in_it_is_refused(here, file):
    """Its files would pass for this run's own."""
    (here / "run").mkdir()
    (here / "run" / file).write_text("")
    for resume in ("off", "auto"):
        assert f"run holds {file} but no manifest.json" in refusal(config(resume=resume))
    assert [path.name for path in (here / "run").iterdir()] == [file]


def test_folder_of_a_process_that_died_at_once_is_taken(here):
    (here / "run").mkdir()
    for file in (".lock", "config.yaml", "manifest.json.part"):
        (here / "run" / file).write_text("")
    assert not open_run("toy", config(resume="auto"), {}).resumed


def test_auto_goes_on_in_its_directory_and_notes_it():
    open_run("toy", config(), {})
    again = open_run("toy", config(resume="auto", device="cpu"), {})
    assert again.resumed and str(again.path) == "run"
    assert len(json.loads((again.path / "manifest.json").read_text())["resumed"]) == 1
    assert yaml.safe_load((again.path / "config.yaml").read_text())["resume"] == "off"  # as it was begun


def test_auto_in_a_directory_without_a_run_starts_one():
    assert not open_run("toy", config(resume="auto"), {}).resumed


@pytest.mark.parametrize("resume", ["auto", "run"])
def test_another_config_is_refused_naming_the_key_and_both_values(resume):
    open_run("toy", config(), {})
    output = "run" if resume == "auto" else None
    message = refusal(config(max_steps=20, resume=resume, output_dir=output))
    assert "max_steps is 10 there, 20 here" in message and "--output-dir" in message


def test_a_run_of_an_earlier_version_that_does_not_say_what_it_is_is_refused():
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


def test_path_goes_on_there():
    open_run("toy", config(), {})
    assert str(open_run("toy", Config(resume="run"), {}).path) == "run"


def test_path_and_another_output_dir_are_refused():
    open_run("toy", config(), {})
    assert "--output-dir other are different directories" in refusal(config(resume="run", output_dir="other"))
    assert open_run("toy", config(resume="run", output_dir="./run"), {}).resumed


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "3", '{"loss": 1.0}'])
def test_damaged_line_of_metrics_is_named(line):
    run = open_run("toy", config(), {})
    run.metrics_path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2 "):
        run.metrics()


def test_path_without_a_run_is_refused():
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
def test_auto_passes_over_a_damaged_neighbour(clock, file):
    good = ended(Config())
    (ended(Config(seed=1)).path / file).write_text("{")
    assert open_run("toy", Config(resume="auto"), {}).path == good.path


def test_run_of_a_living_process_is_refused_and_untouched(here):
    run = open_run("toy", config(), {})
    before = (run.path / "manifest.json").read_bytes()
    run.held.close()
    with locked(run.path):
        assert "another process is writing run" in refusal(config(resume="auto"))
    assert (run.path / "manifest.json").read_bytes() == before
    assert open_run("toy", config(resume="auto"), {}).resumed


def test_a_run_that_was_interrupted_is_resumed_by_the_same_process(here):
    """As in a notebook, whose last traceback keeps everything alive."""
    interrupted = open_run("toy", config(), {})
    assert open_run("toy", config(resume="auto"), {}).resumed
    assert interrupted.held.closed


@pytest.mark.parametrize("file", ["config.yaml", "manifest.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_run_is_refused_naming_the_file(file, text):
    run = ended(config())
    (run.path / file).write_text(text)
    assert file in refusal(config(resume="auto"))


@pytest.mark.parametrize(
    "file, damage",
    [("config.yaml", lambda whole: b"\xff" + whole), ("manifest.json", lambda whole: whole[:-2] + RESUMED)],
)
def test_run_damaged_in_part_is_refused_naming_the_file(file, damage):
    path = ended(config()).path / file
    path.write_bytes(damage(path.read_bytes()))
    assert f"{file} is" in (said := refusal(config(resume="auto"))) and "damaged" in said


# -- what is there, not how its path is spelled ----------------------------------------------------------------------
def test_a_fact_stands_in_for_the_option_that_says_where_it_is():
    open_run("toy", config(limit=1), {"base": "f00"})
    assert open_run("toy", config(limit=2, resume="auto"), {"base": "f00"}).resumed


def test_something_else_in_that_place_is_refused_naming_both():
    open_run("toy", config(limit=1), {"base": "f00"})
    with pytest.raises(UserError) as error:
        open_run("toy", config(limit=2, resume="auto"), {"base": "ba4"})
    assert "base is 'f00' (limit 1) there (manifest.json), 'ba4' (limit 2) here" in str(error.value)


def test_in_a_run_from_before_the_fact_was_kept_the_option_has_to_agree():
    open_run("toy", config(limit=1), {})
    with pytest.raises(UserError) as error:
        open_run("toy", config(limit=2, resume="auto"), {"base": "f00"})
    assert "limit is 1 there, 2 here" in str(error.value)
    del error
    gc.collect()  # the process would end here
    assert open_run("toy", config(limit=1, resume="auto"), {"base": "f00"}).resumed


def test_auto_finds_a_run_whose_model_has_moved(clock):
    run = open_run("toy", Config(limit=1), {"base": "f00"})
    run.held.close()
    assert open_run("toy", Config(limit=2, resume="auto"), {"base": "f00"}).path == run.path
    assert not open_run("toy", Config(limit=2, resume="auto"), {"base": "ba4"}).resumed


def test_held_out_data_comes_from_where_the_data_does():
    ended_with = open_run("toy", config(limit=1), {"base": "f00", "heldout_base": "1"})
    ended_with.held.close()
    with pytest.raises(
        UserError, match=r"heldout_base is '1' \(limit 1\) there \(manifest\.json\), '2' \(limit 3\) here"
    ):
        open_run("toy", config(limit=3, resume="auto"), {"base": "f00", "heldout_base": "2"})


def test_a_value_of_another_preset_names_the_preset():
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
