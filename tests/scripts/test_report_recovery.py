"""The report has every row, measured and in order, and its pictures exist."""

import shutil

import pytest
from small import CPU


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sharp_model_dir, run):
    """A cache, a QAT run with a layer-wise stage, and a recovery run on top, all of a tiny model."""
    folder = tmp_path_factory.mktemp("report")
    model, cache = ["--model", sharp_model_dir], ["--cache-dir", folder / "cache", *CPU]
    small = ["--max-steps", 2, "--eval-rows", 4]
    run("build_kd_cache", *model, *cache, "--length", 32, "--max-rows", 80)
    stages = ["--layer-steps", 2, "--layer-rows", 8]
    run("train_qat", *model, *cache, "--output-dir", folder / "qat", *small, "--max-steps", 4, *stages)
    student = ["--checkpoint", folder / "qat/best.pt"]
    run("train_recovery_lora", *student, *cache, "--output-dir", folder / "recovery", *small)
    return folder


@pytest.fixture
def own(runs):
    return ["--qat-run", runs / "qat", "--recovery-run", runs / "recovery", "--cache-dir", runs / "cache"]


def test_the_report_has_every_stage_with_its_figures_and_pictures(runs, own, run):
    run("report_recovery", *own, "--rows", 4, "--new-tokens", 3, *CPU)
    text = (runs / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    figures = {row[0]: row[1:] for row in rows[2:]}
    assert list(figures) == ["teacher", "round-to-nearest", "layer-wise", "QAT", "+ LoRA"]
    assert float(figures["teacher"][1]) == pytest.approx(0, abs=1e-4) and float(figures["teacher"][2]) == 16
    assert float(figures["round-to-nearest"][1]) > float(figures["layer-wise"][1]) > 0
    assert float(figures["+ LoRA"][2]) > float(figures["QAT"][2]) == 2.5
    for run in ("qat", "recovery"):
        assert f"({run}/plots/metrics.png)" in text and (runs / run / "plots" / "metrics.png").stat().st_size > 1000
    assert "first held-out rows, none of which are among these" in text
    assert text.count("**teacher**:") == 1 and text.count("**+ LoRA**:") == 1


def test_parts_of_different_experiments_are_refused(runs, own, run, refuse, sharp_model_dir, tmp_path):
    """The report would look right but be wrong with an adapter of another student, or with another cache."""

    def refused(*flags) -> str:
        return refuse("report_recovery", *own, "--device", "cpu", "--dry-run", *flags)

    assert "--rows 0" in refused("--rows", 0)
    student = shutil.copytree(runs / "qat", tmp_path / "qat")
    shutil.copy(student / "layerwise.pt", student / "best.pt")
    assert "was not trained on" in refused("--qat-run", student)
    cache = ["--cache-dir", tmp_path / "cache"]
    run("build_kd_cache", "--model", sharp_model_dir, *cache, "--length", 32, "--max-rows", 40, "--device", "cpu")
    assert "--cache-dir" in refused(*cache)
