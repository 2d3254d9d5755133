"""The report has every row, measured and in order, and its pictures exist."""

import json
import shutil

import pytest

from qat_lora.errors import UserError
from qat_lora.run.command_line import parse


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sharp_model_dir, load_script):
    """A cache, a QAT run with layer-wise and scales stages, and a recovery run on top, all of a tiny model."""
    folder = tmp_path_factory.mktemp("report")
    common = ["--precision", "fp32", "--device", "cpu"]
    commands = {
        "build_kd_cache": [
            "--model", sharp_model_dir, "--cache-dir", folder / "cache", "--length", 32, "--max-rows", 80,
        ],
        "train_qat": [
            "--model", sharp_model_dir, "--cache-dir", folder / "cache", "--output-dir", folder / "qat",
            "--layer-steps", 2, "--layer-rows", 8, "--max-steps", 4, "--scale-steps", 2, "--eval-rows", 4,
        ],
        "train_recovery_lora": [
            "--checkpoint", folder / "qat" / "best.pt", "--kd-cache-dir", folder / "cache",
            "--output-dir", folder / "recovery", "--max-steps", 2, "--eval-rows", 4,
        ],
    }  # fmt: skip
    for name, flags in commands.items():
        script = load_script(name)
        script.main(parse(script.Config, name, [str(word) for word in [*flags, *common]]))
    return folder


def test_the_report_has_every_stage_with_its_figures_and_pictures(runs, load_script):
    script = load_script("report_recovery")
    flags = ["--qat-run", runs / "qat", "--recovery-run", runs / "recovery", "--cache-dir", runs / "cache"]
    flags += ["--rows", 4, "--new-tokens", 3, "--precision", "fp32", "--device", "cpu"]
    script.main(parse(script.Config, "report_recovery", [str(word) for word in flags]))
    text = (runs / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    names = [row[0] for row in rows[2:]]
    assert names == ["teacher", "round-to-nearest", "layer-wise", "QAT", "+ scales", "+ LoRA"]
    figures = {row[0]: row[1:] for row in rows[2:]}
    assert float(figures["teacher"][1]) == pytest.approx(0, abs=1e-4)
    assert float(figures["teacher"][2]) == 16
    assert float(figures["round-to-nearest"][1]) > float(figures["layer-wise"][1]) > 0
    assert float(figures["+ LoRA"][2]) > float(figures["QAT"][2]) == 2.5
    for run in ("qat", "recovery"):
        assert f"({run}/plots/metrics.png)" in text and (runs / run / "plots" / "metrics.png").stat().st_size > 1000
    assert "first held-out rows, none of which are among these" in text
    assert text.count("**teacher**:") == 1 and text.count("**+ LoRA**:") == 1


def test_parts_of_different_experiments_are_refused(runs, load_script, tmp_path):
    """With an adapter of another student or another cache than the student's, the report would be wrong but look
    right."""
    script = load_script("report_recovery")

    def refused(**changes) -> str:
        paths = {"qat_run": runs / "qat", "recovery_run": runs / "recovery", "cache_dir": runs / "cache"} | changes
        paths = {key: value if key == "rows" else str(value) for key, value in paths.items()}
        with pytest.raises(UserError) as error:
            script.main(script.Config(device="cpu", dry_run=True, **paths))
        return str(error.value)

    assert "--rows 0" in refused(rows=0)
    student = shutil.copytree(runs / "qat", tmp_path / "qat") / "best.pt"
    shutil.copy(tmp_path / "qat" / "layerwise.pt", student)
    assert "was not trained on" in refused(qat_run=tmp_path / "qat")
    cache = load_script("build_kd_cache")
    made = json.loads((runs / "cache" / "manifest.json").read_text())["spec"]
    flags = ["--model", made["teacher"], "--cache-dir", tmp_path / "cache", "--length", 32, "--max-rows", 40]
    cache.main(parse(cache.Config, "build_kd_cache", [str(word) for word in [*flags, "--device", "cpu"]]))
    assert "--cache-dir" in refused(cache_dir=tmp_path / "cache")
