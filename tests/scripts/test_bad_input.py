"""Bad flags, models, texts and caches give one line that names the fault and its fix, and no data is lost."""

import json
import shutil

import pytest
from locked import locked
from small import CACHE, SMALL, damage

from qat_lora.kd.cache import FORMAT
from qat_lora.models.loading import load_model
from qat_lora.run.files import read_json


# -- flags and presets -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, flags, part",
    [
        ("build_kd_cache", "", "--cache-dir is missing"), ("train_qat", "", "--cache-dir is missing"),
        ("train_recovery_lora", "", "--checkpoint"), ("train_recovery_lora", "--checkpoint a.pt", "--cache-dir"),
        ("train_recovery_lora", "--checkpoint a.pt --v2-checkpoint b.pt", "are the same option; give it once"),
        ("train_recovery_lora", "recovery-rr=4", "did you mean --recovery-r?"),
    ],
)  # fmt: skip
def test_missing_and_misspelt_options_are_named(refuse, script, flags, part):
    assert part in refuse(script, *flags.split())


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--mlp balanced9/g32", "balanced9/g32"), ("--attn lut4/r4096", "rank 4096"), ("--mlp int4/g48", "48"),
        ("--mlp none --attn none", "nothing would be quantised"), ("--init best", "rtn, mse, gptq"),
        ("--device gpu", "cuda"),
        ("--accumulation-steps 1000000000", "--accumulation-steps 1000000000 must be from 1 to 10,000"),
        ("--learning-rate 1e30", "--learning-rate 1e+30 must be above 0 and at most 1,000"),
        ("--eval-rows 0", "--eval-rows 0 must be at least 1"),
        ("--batch-size 64", "24 training rows are fewer than --batch-size 64"),
    ],
)  # fmt: skip
def test_impossible_values_of_qat_are_refused(refuse, qat, tmp_path, flags, part):
    assert part in refuse("train_qat", *qat, *flags.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--targets q,w", "q,k,v,o,gate,up,down"), ("--recovery-r 0", "--lora-r 0"), ("--mode dpo", "kd, sft, recover"),
        ("--recovery-alpha 1e30", "alpha 1e+30"), ("--anchor-weight -1", "--anchor-weight"),
        ("--anchor-cache nowhere", "nowhere has no manifest.json"), ("--adapter-init loftq", "zero, error"),
    ],
)  # fmt: skip
def test_impossible_values_of_recovery_are_refused(refuse, recovery, tmp_path, flags, part):
    assert part in refuse("train_recovery_lora", *recovery, *flags.split())
    assert not (tmp_path / "run").exists()


def test_recovery_without_heldout_text_is_refused_before_training(refuse, tiny_student, tmp_path):
    flags = ["--checkpoint", tiny_student, "--output-dir", tmp_path / "run", *SMALL, "--mode", "recover"]
    message = refuse("train_recovery_lora", *flags, "--length", 16, "--max-rows", 16, "--heldout-fraction", 0)
    assert "--heldout-fraction 0.0 must be above 0" in message
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_models_context_are_refused(refuse, tiny_model_dir, tiny_student, tmp_path):
    for script, *flags in (
        ("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", tmp_path / "c"),
        ("measure_perplexity", "--model", tiny_model_dir),
        ("train_recovery_lora", "--checkpoint", tiny_student, "--mode", "recover", *SMALL),
    ):
        assert "--length 513 exceeds the 512 positions" in refuse(script, *flags, "--length", 513)


# -- models, the hub and texts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["smolm2-135m", "nobody/no-such-model-qat-lora", "./no/such/folder"])
@pytest.mark.parametrize("script", ["build_kd_cache", "train_qat"])
def test_the_error_for_an_unavailable_model_names_the_embedded_one(refuse, cache, tmp_path, monkeypatch, script, name):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # refuses the connection
    folder = tmp_path / "new" if script == "build_kd_cache" else cache
    message = refuse(script, "--model", name, "--cache-dir", folder)
    assert repr(name) in message and "smollm2-135m" in message


@pytest.mark.parametrize("files", [["config.json"], ["config.json", "tokenizer.json", "tokenizer_config.json"]])
def test_a_part_of_a_download_is_not_a_model_that_is_nowhere(refuse, tiny_model_dir, tmp_path, monkeypatch, files):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    there = tmp_path / "models--nobody--half" / "snapshots" / "main"
    there.mkdir(parents=True)
    for file in files:
        shutil.copy(tiny_model_dir / file, there)
    message = refuse("measure_perplexity", "--model", "nobody/half")
    assert "'nobody/half' was only partly downloaded (" in message and "give a local folder" in message


@pytest.fixture
def new(tiny_model_dir, tmp_path):
    """Flags to build a new cache."""
    return ["--model", tiny_model_dir, "--cache-dir", tmp_path / "new", *CACHE]


def test_missing_and_short_texts_are_refused(refuse, new, tmp_path):
    assert '"embedded"' in refuse("build_kd_cache", *new, "--dataset", "nobody/no-such-text-qat-lora")
    assert "no such file" in refuse("build_kd_cache", *new, "--dataset", "missing.txt")
    (tmp_path / "short.txt").write_text("A few words.")
    message = refuse("build_kd_cache", *new, "--dataset", tmp_path / "short.txt", "--length", 64)
    assert "too few for a row of 64; lower --length or add text" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [10**9, 2**63])
@pytest.mark.parametrize("flag", ["--batch-size", "--draws"])
def test_a_teacher_pass_too_large_for_memory_writes_no_cache(refuse, new, tmp_path, flag, number):
    message = refuse("build_kd_cache", *new, "--length", 512, "--max-rows", 8, flag, number)
    assert f"{flag} {number}" in message and "lower --batch-size or --draws" in message
    assert not (tmp_path / "new").exists()


@pytest.fixture
def teacher(tiny_model_dir, tiny_tokenizer, tmp_path):
    """A copy of the tiny model, and the folder that holds its tokenizer, to save it to."""
    tiny_tokenizer.save_pretrained(tmp_path / "teacher")
    return load_model(str(tiny_model_dir)), tmp_path / "teacher"


def test_a_teacher_with_nan_weights_writes_no_cache(refuse, new, teacher, tmp_path):
    model, folder = teacher
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    assert "gives NaN or infinite logits" in refuse("build_kd_cache", *new, "--model", folder)
    assert not (tmp_path / "new").exists()


def test_a_teacher_with_a_padded_embedding_works(run, new, qat, recovery, teacher, tmp_path):
    """It has the student's tokenizer; the additional rows of its embedding are padding."""
    model, folder = teacher
    model.resize_token_embeddings(600)
    model.save_pretrained(folder)
    run("build_kd_cache", *new, "--model", folder)
    run("train_qat", *qat, "--cache-dir", tmp_path / "new", "--max-steps", 1)
    run("train_recovery_lora", *recovery, "--kd-cache-dir", tmp_path / "new", "--output-dir", tmp_path / "lora")
    for folder in ("run", "lora"):
        figures = read_json(tmp_path / folder / "summary.json")["best"]
        assert -0.05 < figures["heldout_kl"] < 0.2  # an estimate from few draws


# -- caches ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("shard", ["shard-00001.safetensors", "heldout-00000.safetensors"])
def test_damaged_shard_is_named_and_the_fix_works(refuse, run, new, qat, cache, tmp_path, kind, shard):
    copy = shutil.copytree(cache, tmp_path / "new")
    damage(copy / shard, kind)
    message = refuse("train_qat", *qat, "--cache-dir", copy)
    assert shard in message and "build_kd_cache.py again" in message
    assert not (tmp_path / "run").exists()
    if kind == "missing":
        run("build_kd_cache", *new)
        assert (copy / shard).read_bytes() == (cache / shard).read_bytes()


@pytest.mark.parametrize(
    "fault", ["truncated", "empty", "missing", {"format": FORMAT}, {"format": FORMAT, "spec": None}]
)
def test_damaged_manifest_is_named(refuse, qat, cache, tmp_path, fault):
    copy = shutil.copytree(cache, tmp_path / "cache")
    manifest = copy / "manifest.json"
    damage(manifest, fault) if isinstance(fault, str) else manifest.write_text(json.dumps(fault))
    message = refuse("train_qat", *qat, "--cache-dir", copy)
    assert str(copy) in message and "manifest.json" in message


@pytest.mark.parametrize("change", [("length", "16"), ("train_rows", 10**12), ("k", -1), ("extra", 1)])
def test_manifest_with_a_damaged_number_is_refused_by_reader_and_builder(refuse, new, qat, cache, tmp_path, change):
    """The fix must not be to build the cache again, because the builder refuses it, too."""
    copy = shutil.copytree(cache, tmp_path / "new")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["spec"] |= [change]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "delete that folder" in refuse("train_qat", *qat, "--cache-dir", copy)
    assert "delete that folder" in refuse("build_kd_cache", *new)


def test_a_cache_from_another_tokenizer_is_refused(refuse, qat, tiny_model_dir, tmp_path):
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    a, b = sorted(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(data))
    message = refuse("train_qat", *qat, "--model", other)
    assert "made with another tokenizer" in message and str(tiny_model_dir) in message and "build one" in message


def test_building_over_another_cache_is_refused_and_leaves_it_unchanged(refuse, new, cache):
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    message = refuse("build_kd_cache", *new, "--cache-dir", cache, "--length", 8, "--max-rows", 9)
    assert "holds another cache" in message and "--cache-dir" in message
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_a_second_builder_of_the_same_cache_is_refused(refuse, run, new, tmp_path):
    with locked(tmp_path / "new"):
        assert "another process is writing" in refuse("build_kd_cache", *new)
    run("build_kd_cache", *new)
