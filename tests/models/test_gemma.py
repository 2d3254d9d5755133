"""The real gemma3-270m (make test-zoo installs it) gives the same perplexity here and in plain transformers."""

import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora.models.packaged import PACKAGED, packaged_file
from qat_lora.run.command_line import parse

pytestmark = pytest.mark.zoo
NAME, LENGTH, WINDOWS = "gemma3-270m", 128, 4
SMALL = ["--device", "cpu", "--precision", "fp32"]


def plain_perplexity(text: Path, folder: Path, **source) -> float:
    """Perplexity computed by plain transformers, on windows of the text in which BOS replaces the first token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    tokens = torch.tensor(tokenizer(text.read_text())["input_ids"][: LENGTH * WINDOWS])
    rows = tokens.view(WINDOWS, LENGTH)
    rows[:, 0] = tokenizer.bos_token_id
    with torch.no_grad():
        logp = torch.cat([model(input_ids=row.unsqueeze(0)).logits[:, :-1].float().log_softmax(-1) for row in rows])
    return math.exp(-logp.gather(2, rows[:, 1:, None]).mean().item())


def test_perplexity_equals_plain_transformers_after_cache_training_and_export(load_script, tmp_path, capsys):
    pytest.importorskip(PACKAGED[NAME].package, reason="make test-zoo installs it")
    text = tmp_path / "text.txt"
    text.write_text(topics["assignment"] + topics["class"])

    def run(script: str, *flags) -> None:
        module = load_script(script)
        module.main(parse(module.Config, script, list(map(str, flags))))

    def ours(*flags) -> float:
        capsys.readouterr()
        sizes = ["--length", LENGTH, "--max-windows", WINDOWS, "--json"]
        run("measure_perplexity", *flags, "--dataset", text, *sizes, *SMALL)
        return json.loads(capsys.readouterr().out)["ppl"]

    base, file = ours("--model", NAME), packaged_file(NAME)
    assert base == pytest.approx(plain_perplexity(text, file.parent, gguf_file=file.name), rel=1e-4)
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
    assert plain_perplexity(text, export) == pytest.approx(learned, rel=1e-4)
    assert ours("--model", export) == pytest.approx(learned, rel=1e-4)
    run("export_model", "--checkpoint", student / "best.pt", "--format", "gguf", "--output-dir", tmp_path / "gguf")
    assert ours("--model", tmp_path / "gguf" / "model.gguf") == pytest.approx(learned, rel=1e-4)
