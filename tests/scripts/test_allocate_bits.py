"""From a cache to a preset, a trained student of mixed bits and its exports; budgets that cannot be met are refused."""

import json

import pytest
import yaml
from records import summary
from small import SMALL

from qat_lora.quant.student import read_student


@pytest.mark.parametrize("flags, formats", [
    (["--bits", 2.9], ["gguf", "compressed-tensors", "mlx", "hf"]),
    (["--megabytes", 0.092, "--target", "llama.cpp", "--rows", 2], ["gguf"]),
])  # fmt: skip
def test_the_preset_trains_a_student_that_exports_hold(run, cache, tiny_model_dir, tmp_path, capsys, flags, formats):
    preset = tmp_path / "bits.yaml"
    run("allocate_bits", "--cache-dir", cache, "--output", preset, "--device", "cpu", *flags)
    said = capsys.readouterr().out
    made = yaml.safe_load(preset.read_text())
    assert made["model"] == str(tiny_model_dir) and made["layers"].count("=") >= 1 and f"--config {preset}" in said
    assert preset.read_text().startswith("# python scripts/allocate_bits.py --cache-dir")
    layers = ["--layer-steps", 1, "--layer-rows", 4, "--output-dir", tmp_path / "run"]
    run("train_qat", "--config", preset, "--cache-dir", cache, *SMALL, *layers)
    found = summary(tmp_path / "run")["bits_per_weight"]
    if "--bits" in flags:
        assert 2.7 < found <= 2.9
    spec = read_student(tmp_path / "run" / "layerwise.pt")["spec"]
    assert spec["layers"] == made["layers"]
    for name in formats:
        student = ["--checkpoint", tmp_path / "run" / "layerwise.pt", "--format", name]
        run("export_model", *student, "--output-dir", tmp_path / name)
        record = json.loads((tmp_path / name / "export.json").read_text())
        assert record["quantisers"]["layers"] == made["layers"]
        if "--megabytes" in flags:
            size = sum(path.stat().st_size for path in (tmp_path / name).glob("model.*"))
            assert record["types"] and size < 0.2e6


@pytest.mark.parametrize("flags, part", [
    (["--bits", 2.0], "--bits 2 cannot be met: these quantisers take at least 2.25"),
    (["--megabytes", 0.01], "--megabytes 0.01 cannot be met: these quantisers take at least"),
    ([], "give either --bits or --megabytes"),
    (["--bits", 3, "--megabytes", 1], "give either --bits or --megabytes"),
    (["--bits", 3, "--quantisers", "int2/g64"], "two or more to choose from"),
    (["--bits", 3, "--quantisers", "int2/g64,int3/g7"], "inputs are not divisible by group 7"),
    (["--bits", 3, "--quantisers", "int2/g64,int3/g64", "--target", "mlx"], "leave out --quantisers"),
    (["--bits", 3, "--cache-dir", "none"], "none"),
])  # fmt: skip
def test_budgets_that_cannot_be_met_are_refused(refuse, cache, tmp_path, flags, part):
    given = [] if "--cache-dir" in flags else ["--cache-dir", cache]
    assert part in refuse("allocate_bits", *given, "--output", tmp_path / "bits.yaml", "--device", "cpu", *flags)
    assert not (tmp_path / "bits.yaml").exists()
