"""The report page of the given run, or of the run that logged last."""

import json
import os
import re
import subprocess
import sys

import pytest

from qat_lora.errors import ROOT, UserError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs under runs/ of the working directory, the second the newest."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"step": step, "stage": "qat", "loss": 3.0 / step}) for step in (1, 2, 3)]
    facts = {"experiment": "train_qat", "started": "20261101T000000Z", "device": "cpu", "git": "0123a", "dirty": False}
    for age, name in enumerate(["train_qat/b", "train_qat/a", "v2_q4"]):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (path / "manifest.json").write_text(json.dumps(facts | {"argv": ["scripts/train_qat.py", "<b>"]}))
        (path / "config.yaml").write_text("mlp: int2/g64\nseed: 7\n")
        os.utime(path / "metrics.jsonl", (1e9, 1e9 + (age == 1)))
    return tmp_path / "runs"


@pytest.fixture
def report(run, capsys):
    def main(*flags) -> str:
        run("report_run", *flags)
        return capsys.readouterr().out.strip()

    return main


def test_the_newest_or_the_given_run_is_reported(report, runs):
    assert report("--dry-run") == "run runs/train_qat/a" and not list(runs.rglob("*.png"))
    assert report() == "runs/train_qat/a/report.html"
    assert (runs / "train_qat/a/plots/metrics.png").read_bytes()[:4] == b"\x89PNG"
    os.utime(runs / "v2_q4/metrics.jsonl", (2e9, 2e9))
    assert report() == "runs/v2_q4/report.html"
    assert report("--run", runs / "train_qat/b") == str(runs / "train_qat/b/report.html")
    assert {path.parents[1].name for path in runs.rglob("metrics.png")} == {"a", "v2_q4", "b"}


def test_the_page_is_one_file_with_figures_plots_samples_and_settings(report, runs):
    path = runs / "v2_q4"
    with open(path / "metrics.jsonl", "a") as file:
        for step, kl in ((0, 2.5), (2, 0.75), (3, 1.25)):
            file.write(json.dumps({"step": step, "stage": "qat", "heldout_kl": kl, "odd": kl}) + "\n")
    (path / "summary.json").write_text(json.dumps({"status": "finished", "best": {"heldout_kl": 0.75}}))
    (path / "samples.txt").write_text("Once upon a time")
    report("--run", path)
    page = (path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "http" not in page
    row = re.search(r"<td>heldout_kl(.*?)</tr>", page)[1]
    assert re.findall(r">([\d.]+)", row) == ["2.5", "0.75", "2.5", "1.25"], "first, lowest, highest, last"
    for text in ("train_qat", "finished", "best.heldout_kl", "int2/g64", "Once upon a time", "&lt;b&gt;"):
        assert text in page, text


def test_bad_input(refusal, runs, tmp_path, monkeypatch):
    assert "has no metrics.jsonl" in refusal("report_run", "--run", tmp_path / "absent")
    assert "train_qat/a, " in refusal("report_run", "--run", runs / "train_qat"), "the runs in a folder are listed"
    (runs / "v2_q4/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n')
    assert "metrics.jsonl is damaged in line 2 (" in refusal("report_run", "--run", runs / "v2_q4")
    (runs / "v2_q4/metrics.jsonl").write_text("")
    assert "holds no figures yet" in refusal("report_run", "--run", runs / "v2_q4")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert f"no run under {tmp_path / 'empty' / 'runs'}" in refusal("report_run")


def test_a_matplotlib_backend_that_does_not_exist_is_ignored(runs):
    script = [sys.executable, ROOT / "scripts" / "report_run.py", "--run", runs / "v2_q4"]
    done = subprocess.run(script, env=os.environ | {"MPLBACKEND": "nonsense"}, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (runs / "v2_q4/plots/metrics.png").exists()


def test_a_broken_matplotlib_gives_one_line(report, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match=r"plots: matplotlib cannot be imported .*; pip install --force-reinstall matp"):
        report()
