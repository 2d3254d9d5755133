"""The real gemma3-270m (make test-zoo installs it) gives the same perplexity here and in plain transformers."""

import json
from pydoc_data.topics import topics

import pytest
from zoo import plain_perplexity

from qat_lora.models.packaged import PACKAGED, packaged_file

pytestmark = pytest.mark.zoo
NAME, LENGTH, WINDOWS = "gemma3-270m", 128, 4
SMALL = ["--device", "cpu", "--precision", "fp32"]


def test_perplexity_equals_plain_transformers_after_cache_training_and_export(run, tmp_path, capsys):
    pytest.importorskip(PACKAGED[NAME].package, reason="make test-zoo installs it")
    text = tmp_path / "text.txt"
    text.write_text(topics["assignment"] + topics["class"])

    def plain(folder, **source) -> float:
        return plain_perplexity(folder, text, WINDOWS, LENGTH, bos=True, **source)

    def ours(*flags) -> float:
        capsys.readouterr()
        sizes = ["--length", LENGTH, "--max-windows", WINDOWS, "--json"]
        run("measure_perplexity", *flags, "--dataset", text, *sizes, *SMALL)
        return json.loads(capsys.readouterr().out)["ppl"]

    base, file = ours("--model", NAME), packaged_file(NAME)
    assert base == pytest.approx(plain(file.parent, gguf_file=file.name), rel=1e-4)
    assert ours("--model", NAME, "--bos", "off") > 1.5 * base, "the model is much worse without BOS"

    cache, student, export = (tmp_path / name for name in ("cache", "student", "export"))
    rows = ["--dataset", text, "--length", LENGTH, "--max-rows", 8, "--heldout-fraction", 0.5]
    run("build_kd_cache", "--model", NAME, *rows, "--cache-dir", cache, *SMALL)
    grids = ["--mlp", "int4/g32", "--attn", "int4/g32", "--head", "int8/g32"]
    train = ["--max-steps", 2, "--warmup-steps", 0, "--learning-rate", 1e-5, "--batch-size", 4, "--eval-rows", 4]
    run("train_qat", "--model", NAME, "--cache-dir", cache, "--output-dir", student, *grids, *train, *SMALL)
    learned = ours("--checkpoint", student / "best.pt")
    assert learned == pytest.approx(base, rel=0.2), "4 bits must not raise the perplexity much"
    run("export_model", "--checkpoint", student / "best.pt", "--format", "hf", "--output-dir", export)
    assert plain(export) == pytest.approx(learned, rel=1e-4)
    assert ours("--model", export) == pytest.approx(learned, rel=1e-4)
    run("export_model", "--checkpoint", student / "best.pt", "--format", "gguf", "--output-dir", tmp_path / "gguf")
    assert ours("--model", tmp_path / "gguf" / "model.gguf") == pytest.approx(learned, rel=1e-4)
