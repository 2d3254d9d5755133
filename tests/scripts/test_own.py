"""--init own: a low-bit model's own codes, scales and offsets are a student's start, and go back unchanged."""

import json

import pytest
import torch
from records import curve
from safetensors.torch import load_file, save_file
from small import CACHE, CPU
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.export.own import own_spec, own_student
from qat_lora.models.loading import gguf_reader, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import StudentSpec, load_student, quantize, save_student

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
QAT = [*CPU, *["--batch-size", "8", "--eval-rows", "8", "--warmup-steps", "0"]]
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
GRIDS = [
    ("gguf", grid)
    for grid in (*K_QUANTS, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "q2_0", "ternary/g64", "balanced4/g32")
]
GRIDS += [("compressed-tensors", grid) for grid in ("int3/g64", "balanced4/g32", "ternary/g64", "int8/g256")]
GRIDS += [("gptq", "int4/g64"), ("gptq", "int3/g32"), ("gptq", "ternary/g64"), ("autoround", "int2/g64")]
GRIDS += [("gptq", "int4/g64+zero"), ("awq", "int4/g128+zero"), ("compressed-tensors", "int2/g64+zero")]
GRIDS += [("mlx", "int5/g64+offset")]


@pytest.fixture(scope="module")
def full(tiny_tokenizer, tmp_path_factory):
    """A Llama in full precision whose inputs are divisible by 256."""
    folder = tmp_path_factory.mktemp("full")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE, vocab_size=len(tiny_tokenizer))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in (p for p in model.parameters() if p.ndim > 1):
        parameter.data.mul_(5)  # else all tokens are about equally likely, and nothing can be lost
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def low(run, full, tmp_path_factory):
    """low(format, grid, head): a low-bit model and the student that was exported to it."""

    def make(kind: str, grid: str, head: str = "none"):
        folder, spec = tmp_path_factory.mktemp("low"), StudentSpec(grid, grid, head)
        student = quantize(load_model(str(full)), spec)
        initialise(student)
        save_student(folder / "best.pt", student, str(full), spec, {"trained": True})
        run("export_model", "--checkpoint", folder / "best.pt", "--format", kind, "--output-dir", folder / "out")
        return folder / "out" / ("model.gguf" if kind == "gguf" else ""), folder / "best.pt"

    return make


@pytest.mark.parametrize("kind, grid", GRIDS)
def test_codes_scales_and_offsets_are_the_models_own(low, kind, grid):
    path, file = low(kind, grid, "int8/g64" if kind == "mlx" else "none")
    student, base = own_student(str(path), own_spec(str(path))), load_model(str(path))
    rounded = grid in ("q4_1", "q5_1") or (kind, grid) == ("gguf", "balanced4/g32")  # offsets become fp16
    for name, layer in quantized_layers(load_student(file)[0]).items():
        mine = quantized_layers(student)[name]
        for weight in (base.get_parameter(f"{name}.weight"), mine.weight):
            torch.testing.assert_close(weight, layer.weight, rtol=1e-6, atol=1e-3 if rounded else 1e-8, msg=name)
        assert torch.equal(mine.quantizer.decode(mine.quantizer.encode(mine.weight)), mine.weight), name


def tensors_of(path) -> dict:
    """All tensors of a model file, as bytes."""
    if path.suffix == ".gguf":
        return {tensor.name: tensor.data.tobytes() for tensor in gguf_reader(path).tensors}
    return {name: value.numpy().tobytes() for name, value in load_file(path / "model.safetensors").items()}


@pytest.mark.parametrize(
    "kind, grid, head",
    [
        ("gguf", "q2_k", "q6_k"),
        ("gptq", "int2/g64", "none"),
        ("mlx", "int2/g64+offset", "none"),
        ("awq", "int4/g64+zero", "none"),
    ],
)
def test_it_is_written_back_as_it_was_or_better(low, run, full, tmp_path, kind, grid, head):
    path, _ = low(kind, grid, head)
    run("build_kd_cache", "--model", full, "--cache-dir", tmp_path / "cache", *CACHE, "--length", 32, "--max-rows", 256)
    flags = ["--model", path, "--init", "own", "--cache-dir", tmp_path / "cache", *QAT]
    for name, steps in (("same", 0), ("better", 48)):
        made = tmp_path / name
        run("train_qat", *flags, "--max-steps", steps, "--eval-every", 8, "--output-dir", made)
        back = ["--checkpoint", made / "best.pt", "--format", kind, "--output-dir", made / "out"]
        run("export_model", *back)
    kl = curve(tmp_path / "better", "heldout_kl")
    assert min(kl) < (0.995 if "int4" in grid else 0.98) * kl[0]
    there = [tensors_of(tmp_path / name / "out" / ("model.gguf" * (kind == "gguf"))) for name in ("same", "better")]
    assert there[0] == tensors_of(path) and there[1].keys() == there[0].keys() and there[1] != there[0]


@pytest.mark.parametrize("script, flags", [
    ("train_cot_sft", "--method full --count 60 --max-steps 2 --length 640 --eval-answers 0 --final-answers 0"),
    ("train_musclebob_improved", "--quick --max-prompt-length 200 --max-completion-length 6"),
])  # fmt: skip
def test_sft_and_grpo_start_from_it(low, run, tmp_path, script, flags):
    path, _ = low("gguf", "q4_k")
    run(script, "--model", path, "--init", "own", *flags.split(), *CPU, "--output-dir", tmp_path / "run")
    name = "student.pt" if script == "train_cot_sft" else "model.pt"
    assert load_student(tmp_path / "run" / name)[1]["spec"]["mlp"] == str(StudentSpec("q4_k", "none").mlp)


@pytest.mark.parametrize("flags, said", [
    (["--mlp", "int4/g64"], "--init own takes the quantisers and scales of --model; leave out --mlp, or --init own"),
    (["--layer-steps", 2], "leave out --layer-steps"), (["--target", "mlx"], "leave out --target"),
])  # fmt: skip
def test_what_own_decides_is_refused(low, refuse, tmp_path, flags, said):
    path, _ = low("gptq", "int4/g64")
    flags = ["--model", path, "--init", "own", "--cache-dir", tmp_path, *flags]
    assert said in refuse("train_qat", *flags)


def edited(path, folder, edit):
    """A copy of a packed folder with other tensors."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    folder.mkdir()
    for file in path.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_layer_whose_zero_points_are_all_the_middle_one_is_written_back(low, run, tmp_path):
    def middle(tensors):
        tensors["model.layers.1.mlp.up_proj.qzeros"].fill_(0x77777777)  # a zero of 8, stored as 7

    path, file = edited(low("gptq", "int4/g64+zero")[0], tmp_path / "middle", middle), tmp_path / "student.pt"
    spec = own_spec(str(path))
    save_student(file, own_student(str(path), spec), str(path), spec, {"trained": True})
    run("export_model", "--checkpoint", file, "--format", "gptq", "--output-dir", tmp_path / "back")
    assert tensors_of(tmp_path / "back") == tensors_of(path)


def test_what_is_not_read_is_refused_by_name(low, full, refuse, tmp_path):
    path, _ = low("gptq", "int4/g64")
    layer, flags = "model.layers.1.mlp.up_proj", ["--init", "own", "--cache-dir", tmp_path, "--model"]

    def turned(tensors):
        tensors[f"{layer}.g_idx"] = tensors[f"{layer}.g_idx"].flip(0).contiguous()

    def missing(tensors):
        del tensors[f"{layer}.qzeros"]

    for edit, said in ((turned, "desc_act"), (missing, "is stored as g_idx, qweight, scales, which")):
        wrong = refuse("train_qat", *flags, edited(path, tmp_path / edit.__name__, edit))
        assert layer in wrong and said in wrong
    awq = edited(path, tmp_path / "awq", lambda tensors: None)
    config = json.loads((awq / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "awq", "version": "gemv"}
    (awq / "config.json").write_text(json.dumps(config))
    assert "is stored quantised (awq" in refuse("train_qat", *flags, awq)
    assert "has no quantised layers in its blocks; use --init mse or gptq" in refuse("train_qat", *flags, full)
