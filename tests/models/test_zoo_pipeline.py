"""Whole pipelines on tiny models of many families: plain transformers reproduces our figures on the export."""

import json
from pydoc_data.topics import topics

import pytest
import zoo

from qat_lora.errors import UserError

LENGTH, WINDOWS = 32, 12
SMALL = ["--device", "cpu", "--precision", "fp32", "--batch-size", 2]
TRAIN = ["--max-steps", 2, "--warmup-steps", 0, "--learning-rate", 2e-3, "--eval-rows", 4, *SMALL]
BLOCKS = ["--init", "gptq", "--layer-steps", 1, "--layer-rows", 4]
FAMILIES = """
    llama qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text gemma4_text granite cohere cohere2 mistral ministral3 phi
    phi3 gpt_neox falcon olmo2 olmo3 starcoder2 stablelm glm glm4 smollm3 exaone4 nemotron minicpm3 mixtral qwen2_moe
    qwen3_moe phimoe gpt_oss granitemoe olmoe llama4_text deepseek_v3 glm4_moe qwen3_next qwen3_5_text falcon_h1
    granitemoehybrid bamba jamba lfm2 lfm2_moe nemotron_h mamba2 recurrent_gemma
"""
FEW = ["gemma4_text", "gpt_oss"]
ENTANGLED = ["gemma3n_text", "gemma4_text"]  # later blocks reuse keys and values of earlier ones
UNSEEN = ["bamba", "falcon_h1", "mamba2", "nemotron_h", "recurrent_gemma"]  # some weights are not in linear layers
VARIANTS = {"gemma4_text-alone": {"num_kv_shared_layers": 0}, "mistral-tied": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["assignment"][:4000])
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.zoo) for n in [*FAMILIES.split(), *VARIANTS]]
)
def test_plain_transformers_measures_our_perplexity_on_the_export(run, text, tmp_path, capsys, name):
    base, cache, qat, recovery = (tmp_path / part for part in ("base", "cache", "qat", "recovery"))
    zoo.model(name.partition("-")[0], **VARIANTS.get(name, {})).save_pretrained(base)
    zoo.tokenizer().save_pretrained(base)

    def ours(*flags) -> tuple[float, float]:
        """Our perplexity and bits per weight."""
        capsys.readouterr()
        flags = [*flags, "--dataset", text, "--length", LENGTH, "--max-windows", WINDOWS, "--json", *SMALL]
        run("measure_perplexity", *flags)
        found = json.loads(capsys.readouterr().out)
        return found["ppl"], found["bits_per_weight"]

    whole, bits = ours("--model", base)
    assert bits == 16 and whole == pytest.approx(zoo.plain_perplexity(base, text, WINDOWS, LENGTH), rel=1e-4)
    rows = ["--dataset", text, "--length", LENGTH, "--max-rows", 24, "--heldout-fraction", 0.25]
    run("build_kd_cache", "--model", base, *rows, "--cache-dir", cache, *SMALL)
    student, blocks = ["--model", base, "--cache-dir", cache, "--output-dir", qat, *TRAIN], BLOCKS
    if name in ENTANGLED:
        with pytest.raises(UserError, match="cannot be trained block by block"):
            run("train_qat", *student, *blocks)
        blocks = []
    run("train_qat", *student, *blocks)
    best = ["--checkpoint", qat / "best.pt"]
    start = ["--adapter-init", "error"]  # not zero, so the adapter has an effect whichever step was best
    run("train_recovery_lora", *best, *start, "--kd-cache-dir", cache, "--output-dir", recovery, *TRAIN)
    adapter = ["--adapter", recovery / "adapter"]
    perplexities = {whole}
    for kind, made in (("hf", best), ("merged", [*best, *adapter])):
        run("export_model", *made, "--format", kind, "--output-dir", tmp_path / kind)
        ppl, bits = ours(*made)
        assert zoo.plain_perplexity(tmp_path / kind, text, WINDOWS, LENGTH) == pytest.approx(ppl, rel=1e-4)
        perplexities.add(ppl)
        assert kind == "merged" or bits < (7 if name in UNSEEN else 3)
    assert len(perplexities) == 3, "quantisation and the adapter must both change the perplexity"
