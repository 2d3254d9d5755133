"""Bad flags, models, texts and caches give one line that names the fault and its fix, and no data is lost."""

import json
import shutil
from pathlib import Path

import pytest
from locked import locked
from small import SMALL, damage

from qat_lora.kd.cache import FORMAT
from qat_lora.models.loading import load_model
from qat_lora.run.files import read_json


# -- flags and presets -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, flag",
    [("build_kd_cache", "--cache-dir"), ("train_qat", "--cache-dir"), ("train_recovery_lora", "--checkpoint")],
)
def test_missing_flag_is_named(refuse, script, flag):
    message = refuse(script)
    assert flag in message and ("missing" in message or "give" in message)


def test_an_option_given_under_two_names_is_refused(refuse, tiny_student):
    said = refuse("train_recovery_lora", "--checkpoint", tiny_student, "--v2-checkpoint", "other.pt")
    assert "--checkpoint and --v2-checkpoint are the same option; give it once" in said


def test_recovery_without_a_cache_is_refused(refuse, tiny_student):
    assert "--cache-dir" in refuse("train_recovery_lora", "--checkpoint", tiny_student)


@pytest.mark.parametrize(
    "script, flags, near",
    [
        ("train_qat", ["--cache-dri", "x"], "did you mean --cache-dir?"),
        ("build_kd_cache", ["--datast", "x"], "did you mean --dataset?"),
        ("train_recovery_lora", ["recovery-rr=4"], "did you mean --recovery-r?"),
        ("train_qat", ["--config", "q2_g23"], "did you mean q2_g32?"),
        ("train_recovery_lora", ["--config", "dmo"], "did you mean demo?"),
    ],
)
def test_misspelt_flag_or_preset_names_the_nearest(refuse, script, flags, near):
    assert near in refuse(script, *flags)


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--mlp", "balanced5/g32"], "balanced5/g32"), (["--attn", "lut4/r4096"], "rank 4096"),
        (["--mlp", "int4/g48"], "48"), (["--mlp", "none", "--attn", "none"], "nothing would be quantised"),
        (["--init", "best"], "rtn, mse, gptq"), (["--scope", "head"], "all, mlp, attn, weights"),
        (["--ema", "1"], "--ema 1.0"), (["--scale-steps", "-1"], "--scale-steps -1"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--learning-rate", "-1"], "--learning-rate -1.0"), (["--accumulation-steps", "0"], "--accumulation-steps 0"),
        (["--accumulation-steps", "1000000000"], "--accumulation-steps 1000000000 must be from 1 to 10,000"),
        (["--max-steps", "1000000000000"], "--max-steps 1000000000000 must be from 0 to 1,000,000,000"),
        (["--layer-steps", "1000000000000"], "--layer-steps 1000000000000 must be from 0 to 1,000,000,000"),
        (["--scale-steps", "1000000000000"], "--scale-steps 1000000000000 must be from 0 to 1,000,000,000"),
        (["--learning-rate", "1e30"], "--learning-rate 1e+30 must be above 0 and at most 1,000"),
        (["--scale-learning-rate", "1e30"], "--scale-learning-rate 1e+30"),
        (["--layer-learning-rate", "1e30"], "--layer-learning-rate 1e+30"),
        (["--layer-kd-weight", "1e30"], "--layer-kd-weight 1e+30 must be from 0 to 1,000,000"),
        (["--precision", "fp8"], "auto, fp32, bf16"), (["--device", "gpu"], "cuda"),
    ],
)  # fmt: skip
def test_impossible_values_of_qat_are_refused(refuse, qat, tmp_path, flags, part):
    assert part in refuse("train_qat", *qat, *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--targets", "q,w"], "q,k,v,o,gate,up,down"),
        (["--recovery-r", "0"], "--lora-r 0"),
        (["--mode", "dpo"], "kd, sft, recover"),
        (["--accumulation-steps", "1000000000"], "--accumulation-steps 1000000000"),
        (["--max-steps", "1000000000000"], "--max-steps 1000000000000 must be from 0 to 1,000,000,000"),
        (["--recovery-alpha", "1e30"], "alpha 1e+30"),
        (["--anchor-weight", "1e30"], "--anchor-weight 1e+30"),
        (["--learning-rate", "1e30"], "--learning-rate 1e+30"),
        (["--adapter-init", "loftq"], "zero, error"),
    ],
)
def test_impossible_values_of_recovery_are_refused(refuse, tiny_student, cache, tmp_path, flags, part):
    student = ["--checkpoint", tiny_student, "--kd-cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
    assert part in refuse("train_recovery_lora", *student, *flags)
    assert not (tmp_path / "run").exists()


# -- models and the hub ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["smolm2-135m", "nobody/no-such-model-qat-lora", "./no/such/folder"])
@pytest.mark.parametrize("script", ["build_kd_cache", "train_qat"])
def test_the_error_for_an_unavailable_model_names_the_embedded_one(refuse, cache, tmp_path, script, name):
    folder = tmp_path / "new" if script == "build_kd_cache" else cache
    message = refuse(script, "--model", name, "--cache-dir", folder)
    assert repr(name) in message and "smollm2-135m" in message


def test_the_error_for_an_unavailable_dataset_names_the_embedded_one(refuse, tiny_model_dir, tmp_path):
    flags = ["--model", tiny_model_dir, "--cache-dir", tmp_path / "new"]
    message = refuse("build_kd_cache", *flags, "--dataset", "nobody/no-such-text-qat-lora")
    assert "nobody/no-such-text-qat-lora" in message and '"embedded"' in message
    assert "no such file" in refuse("build_kd_cache", *flags, "--dataset", "missing.txt")


# -- text and caches -------------------------------------------------------------------------------------------------
def test_text_too_short_for_one_row_is_refused(refuse, tiny_model_dir, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    flags = ["--model", tiny_model_dir, "--cache-dir", tmp_path / "new", "--dataset", tmp_path / "short.txt"]
    message = refuse("build_kd_cache", *flags, "--length", 64)
    assert "too few for a row of 64" in message and "lower --length or add text" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("shard", ["shard-00001.safetensors", "heldout-00000.safetensors"])
def test_damaged_shard_is_named(refuse, qat, cache, tmp_path, kind, shard):
    copy = shutil.copytree(cache, tmp_path / "cache")
    (copy / shard).unlink() if kind == "missing" else damage(copy / shard, kind)
    message = refuse("train_qat", *qat, "--cache-dir", copy)
    assert shard in message and "build_kd_cache.py again" in message
    assert not (tmp_path / "run").exists()


def test_the_fix_for_a_damaged_shard_works(run, qat, cache, tiny_model_dir, tmp_path):
    """The fix in the message: delete it and build again."""
    copy = shutil.copytree(cache, tmp_path / "cache")
    (copy / "shard-00001.safetensors").unlink()
    spec = json.loads((cache / "manifest.json").read_text())["spec"]
    size = ["--length", spec["length"], "--max-rows", 32, "--heldout-fraction", 0.25, "--rows-per-shard", 8]
    flags = ["--device", "cpu", "--precision", "fp32"]
    run("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", copy, *size, *flags)
    for path in cache.glob("*.safetensors"):
        assert (copy / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["truncated", "empty", "missing"])
def test_damaged_manifest_is_named(refuse, qat, cache, tmp_path, kind):
    copy = shutil.copytree(cache, tmp_path / "cache")
    (copy / "manifest.json").unlink() if kind == "missing" else damage(copy / "manifest.json", kind)
    assert "manifest.json" in refuse("train_qat", *qat, "--cache-dir", copy)


@pytest.mark.parametrize("content", [{"format": FORMAT}, {"format": FORMAT, "spec": None}])
def test_manifest_without_its_parts_is_named(refuse, qat, cache, tmp_path, content):
    copy = shutil.copytree(cache, tmp_path / "cache")
    (copy / "manifest.json").write_text(json.dumps(content))
    assert str(copy) in refuse("train_qat", *qat, "--cache-dir", copy)


def test_a_cache_from_another_tokenizer_is_refused(refuse, qat, tiny_model_dir, tiny_tokenizer, tmp_path):
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    a, b = sorted(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(data))
    message = refuse("train_qat", *qat, "--model", other)
    assert "made with another tokenizer" in message and str(tiny_model_dir) in message and "build one" in message


@pytest.mark.parametrize("change", [("length", "16"), ("train_rows", 10**12), ("k", -1), ("extra", 1)])
def test_manifest_with_a_damaged_number_is_refused_by_reader_and_builder(
    refuse, qat, cache, tiny_model_dir, tmp_path, change
):
    """The fix must not be to build the cache again, because the builder refuses it, too."""
    copy = shutil.copytree(cache, tmp_path / "cache")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["spec"] |= [change]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "delete that folder" in refuse("train_qat", *qat, "--cache-dir", copy)
    flags = "--length 16 --max-rows 32 --heldout-fraction 0.25 --rows-per-shard 8 --device cpu --precision fp32"
    message = refuse("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", copy, *flags.split())
    assert "delete that folder" in message


@pytest.fixture
def altered(tiny_model_dir, tiny_tokenizer, tmp_path):
    """altered(change): a folder with the tiny tokenizer and the tiny model after change(model)."""

    def make(change) -> Path:
        model = load_model(str(tiny_model_dir))
        change(model)
        model.save_pretrained(tmp_path / "altered")
        tiny_tokenizer.save_pretrained(tmp_path / "altered")
        return tmp_path / "altered"

    return make


def test_a_teacher_with_nan_weights_writes_no_cache(refuse, altered, tmp_path):
    teacher = altered(lambda model: model.model.norm.weight.data.fill_(float("nan")))
    flags = ["--cache-dir", tmp_path / "c", "--length", 16, "--max-rows", 8, "--device", "cpu", "--precision", "fp32"]
    assert "gives NaN or infinite logits" in refuse("build_kd_cache", "--model", teacher, *flags)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("number", [10**9, 10**12, 2**63])
@pytest.mark.parametrize("flag", ["--batch-size", "--draws"])
def test_a_teacher_pass_too_large_for_memory_writes_no_cache(refuse, tiny_model_dir, tmp_path, flag, number):
    flags = ["--cache-dir", tmp_path / "c", "--length", 512, "--max-rows", 8, "--device", "cpu", "--precision", "fp32"]
    message = refuse("build_kd_cache", "--model", tiny_model_dir, *flags, flag, number)
    assert f"{flag} {number}" in message and "lower --batch-size or --draws" in message
    assert not (tmp_path / "c").exists()


def test_a_teacher_with_a_padded_embedding_works(run, qat, altered, tiny_student, tmp_path):
    """It has the student's tokenizer; the additional rows of its embedding are padding."""
    teacher = altered(lambda model: model.resize_token_embeddings(600))
    flags = ["--length", 16, "--max-rows", 32, "--heldout-fraction", 0.25, "--device", "cpu", "--precision", "fp32"]
    run("build_kd_cache", "--model", teacher, "--cache-dir", tmp_path / "c", *flags)
    run("train_qat", *qat, "--cache-dir", tmp_path / "c", "--max-steps", 1)
    recovery = ["--checkpoint", tiny_student, "--kd-cache-dir", tmp_path / "c", "--output-dir", tmp_path / "lora"]
    run("train_recovery_lora", *recovery, *SMALL)
    for folder in ("run", "lora"):
        figures = read_json(tmp_path / folder / "summary.json")["best"]
        assert -0.05 < figures["heldout_kl"] < 0.2  # an estimate from few draws


def test_rows_longer_than_the_models_context_are_refused(refuse, tiny_model_dir, tiny_student, tmp_path):
    message = refuse("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", tmp_path / "c", "--length", 513)
    assert "--length 513 exceeds the 512 positions" in message
    assert "exceeds the 512 positions" in refuse("measure_perplexity", "--model", tiny_model_dir, "--length", 1024)
    flags = ["--checkpoint", tiny_student, "--mode", "recover", "--length", 1024, *SMALL]
    assert "exceeds the 512 positions" in refuse("train_recovery_lora", *flags)


@pytest.mark.parametrize("flag", ["--anchor-weight=-1", "--anchor-rows=0", "--anchor-length=1"])
def test_impossible_anchor_is_refused(refuse, tiny_student, cache, flag):
    message = refuse("train_recovery_lora", "--checkpoint", tiny_student, "--kd-cache-dir", cache, *SMALL, flag)
    assert flag.split("=")[0] in message


def test_fewer_rows_than_a_batch_are_refused(refuse, qat, tmp_path):
    message = refuse("train_qat", *qat, "--batch-size", 64)
    assert "24 training rows" in message and "--batch-size 64" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rows", [0, -1])
def test_an_evaluation_of_no_rows_is_refused_before_training(refuse, qat, tmp_path, rows):
    """Rather than hours later, after the layer-wise stage."""
    assert f"--eval-rows {rows} must be at least 1" in refuse("train_qat", *qat, "--eval-rows", rows)
    assert not (tmp_path / "run").exists()


def test_recovery_without_heldout_text_is_refused_before_training(refuse, tiny_student, tmp_path):
    text = ["--mode", "recover", "--length", 16, "--max-rows", 16, "--heldout-fraction", 0]
    message = refuse(
        "train_recovery_lora", "--checkpoint", tiny_student, "--output-dir", tmp_path / "run", *SMALL, *text
    )
    assert "--heldout-fraction 0.0 must be above 0" in message
    assert not (tmp_path / "run").exists()


def test_building_over_another_cache_is_refused_and_leaves_it_unchanged(refuse, cache, tiny_model_dir):
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    message = refuse("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", cache, "--length", 8, "--max-rows", 9)
    assert "holds another cache" in message and "--cache-dir" in message
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_a_second_builder_of_the_same_cache_is_refused(refuse, run, tiny_model_dir, tmp_path):
    flags = [
        "--model",
        tiny_model_dir,
        "--cache-dir",
        tmp_path / "c",
        "--length",
        16,
        "--max-rows",
        8,
        "--device",
        "cpu",
    ]
    with locked(tmp_path / "c"):
        assert "another process is writing" in refuse("build_kd_cache", *flags)
    run("build_kd_cache", *flags)
