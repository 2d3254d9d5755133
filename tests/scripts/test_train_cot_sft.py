"""The legal fine-tune on the tiny model: files of a run, resuming after a kill, two workers, bad input."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
import transformers
from records import apart, assert_same_files, lines, summary
from safetensors.torch import load_file
from small import CPU

from qat_lora.errors import UserError
from qat_lora.experiments.legal.rules import generate
from qat_lora.lora.adapter import load_adapter
from qat_lora.models.loading import load_model, plain_state
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import load_student

SMALL = "--count 60 --length 512 --batch-size 4 --accumulation-steps 2 --epochs 1 --lora-r 4 --eval-every 3 "
SMALL += "--eval-answers 2 --final-answers 3 --answer-rows 2 --max-new-tokens 6 --save-every 2 --log-every 1"
SMALL = [*SMALL.split(), *CPU]
SHORT = "--batch-size 2 --accumulation-steps 1 --epochs 0.1 --eval-every 0 --eval-answers 0 --final-answers 0"
SHORT = SHORT.split()
WEIGHTED = ["--section-weights", "answer=2,topic=0.5"]


@pytest.fixture(scope="module")
def train(run, sharp_model_dir):
    """train(*flags): a small run on the sharp tiny model."""
    return lambda *flags: run("train_cot_sft", "--model", sharp_model_dir, *SMALL, *flags)


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("law") / "whole"
    train("--output-dir", folder, *WEIGHTED)
    return folder


def test_the_files_of_a_finished_run(trained):
    assert {path.name for path in trained.iterdir()} >= {
        "config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "data.json", "authorities.json",
        "baseline_evaluation.json", "final_evaluation.json", "adapter", "model", "checkpoints",
    }  # fmt: skip
    end = summary(trained)
    assert end["status"] == "finished" and end["merged_logit_gap"] <= 1e-4
    assert {"format", "accuracy", "citation_recall", "invented"} <= set(end["final"])
    measured = [line for line in lines(trained) if "heldout_nll" in line]
    names = {f"{name}_ppl" for name in ("heldout", "topic", "difficulty", "reasoning", "answer", "citation")}
    assert all(names | {"format", "accuracy", "invented"} <= line.keys() for line in measured)
    assert min(line["heldout_nll"] for line in measured) < measured[0]["heldout_nll"]
    answers = json.loads((trained / "final_evaluation.json").read_text())["answers"]
    data = json.loads((trained / "data.json").read_text())
    assert len(answers) == 3 and {answer["id"] for answer in answers} <= set(data["heldout"])
    assert data["train"] + len(data["heldout"]) + sum(map(len, data["left_out"].values())) == 60
    assert (trained / "plots" / "metrics.png").read_bytes()[:4] == b"\x89PNG"


def test_the_merged_model_equals_the_base_with_the_adapter(trained, sharp_model_dir):
    tokens = torch.randint(3, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        merged = load_model(str(trained / "model")).double()(input_ids=tokens).logits
        base = load_model(str(sharp_model_dir))
        plain = base.double()(input_ids=tokens).logits
        adapted = load_adapter(base.float(), trained / "adapter").double()(input_ids=tokens).logits
    assert (merged - adapted).abs().max() <= 1e-4 < (merged - plain).abs().max()


@pytest.mark.parametrize("kind, quantize", [("Mixtral", "none"), ("Qwen3Moe", "int4/tensor")])
def test_a_mixture_of_experts_is_merged_too(train, full_model_dir, tmp_path, capsys, kind, quantize):
    """The experts do not change. The check in fp64 works, too, although torch's grouped matrix product rejects fp64."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_local_experts=4, num_experts_per_tok=2, vocab_size=512,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    base = full_model_dir(transformers.AutoModelForCausalLM.from_config(config))
    train("--model", base, "--output-dir", tmp_path / "run", *SHORT, "--quantize", quantize)
    said = capsys.readouterr().out
    assert "adapter: 8 layers (q_proj, k_proj, v_proj, o_proj in each of 2 blocks)" in said
    assert "experts are left as they are\n" in said
    assert summary(tmp_path / "run")["merged_logit_gap"] <= 1e-4
    student = load_student(tmp_path / "run" / "base.pt")[0] if quantize != "none" else load_model(str(base))
    whole = load_model(str(tmp_path / "run" / "model"))
    before, after = student.state_dict(), whole.state_dict()
    for name, value in after.items():
        assert torch.equal(before[name], value) == ("self_attn" not in name or "norm" in name), name


def test_a_run_killed_twice_resumes_to_the_same_end(train, trained, tmp_path, dies_at):
    flags = ["--output-dir", tmp_path / "run", *WEIGHTED, "--resume", "auto"]
    for update in (4, 3):  # the second is the fifth of the run, which resumed after its second
        with dies_at(update):
            train(*flags)
        torch.manual_seed(7)
    train(*flags)
    assert lines(tmp_path / "run") == lines(trained)
    files = ("model/model.safetensors", "adapter/adapter_model.safetensors", "final_evaluation.json")
    assert_same_files(tmp_path / "run", trained, *files)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 2


@pytest.fixture
def unfinished(trained, tmp_path):
    """A copy of `trained` without its summary."""
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "summary.json").unlink()
    return folder


def test_resuming_on_a_base_with_other_weights_is_refused(train, unfinished, sharp_model_dir, tiny_model_dir, tmp_path):
    shutil.copytree(sharp_model_dir, tmp_path / "base")
    shutil.copy(tiny_model_dir / "model.safetensors", tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match="run of another config: base is"):
        train("--model", tmp_path / "base", "--output-dir", unfinished, *WEIGHTED, "--resume", "auto")


def test_files_that_a_killed_process_left_incomplete_are_written_again(train, trained, unfinished):
    names = ("model/model.safetensors", "baseline_evaluation.json", "final_evaluation.json")
    for name in names:
        (unfinished / name).write_text("{}")
    train("--output-dir", unfinished, *WEIGHTED, "--resume", "auto")
    assert_same_files(unfinished, trained, *names)


def test_full_training_trains_every_parameter(train, sharp_model_dir, tmp_path):
    train("--output-dir", tmp_path / "run", "--method", "full", *SHORT, "--save-every", 1, "--keep", 1)
    before = load_file(sharp_model_dir / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    assert not (tmp_path / "run" / "adapter").exists()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


def test_a_quantised_base_is_kept_and_its_adapter_is_bound_to_it(train, tmp_path):
    folder = tmp_path / "run"
    train("--output-dir", folder, "--quantize", "int4/g32", "--method", "rslora", *SHORT)
    student, made = load_student(folder / "base.pt")
    assert made["spec"]["mlp"] == made["spec"]["attn"] == "int4/g32"
    adapted = load_adapter(student, folder / "adapter", folder / "base.pt")
    assert next(m.scaling["default"] for m in adapted.modules() if hasattr(m, "lora_A")) == 64 / 4**0.5, "rsLoRA"
    with pytest.raises(UserError, match="a quantised student"):
        load_adapter(load_model(str(folder / "model")), folder / "adapter")


@pytest.mark.parametrize("init", ["gptq", "mse"])
def test_full_training_in_low_bits_writes_the_student_and_the_same_model(train, tmp_path, init):
    folder = tmp_path / "run"
    flags = ["--quantize", "int4/g32", "--method", "full", "--init", init, "--learning-rate", 1e-2, *SHORT]
    train("--output-dir", folder, *flags)
    student, made = load_student(folder / "student.pt")
    assert made["spec"]["mlp"] == made["spec"]["attn"] == "int4/g32" and not (folder / "base.pt").exists()
    whole, own = load_model(str(folder / "model")).state_dict(), plain_state(student)
    assert all(torch.equal(whole[name], value) for name, value in own.items())
    train("--output-dir", tmp_path / "more", "--checkpoint", folder / "student.pt", *SHORT)
    base = load_student(tmp_path / "more" / "base.pt")[0]
    codes, before = ({n: m.quantizer.codes for n, m in quantized_layers(s).items()} for s in (base, student))
    assert all(torch.equal(code, before[name]) for name, code in codes.items()), "an adapter on the trained codes"


def test_a_file_with_the_same_columns_works_like_generated_data(train, tmp_path, trained):
    rows = list(generate(60, 0))
    rows[7] = rows[7] | {"question": rows[3]["question"]}  # a duplicate
    rows[9] = rows[9] | {"reasoning": "Step 1: " + "and so on " * 600}  # too long
    file = tmp_path / "law.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train("--dataset", file, "--output-dir", tmp_path / "run", *SHORT)
    left_out = json.loads((tmp_path / "run" / "data.json").read_text())["left_out"]
    assert left_out["the same question as an earlier row"] == ["law-000008"]
    ((reason, long),) = [found for found in left_out.items() if found[0].startswith("longer than 512 tokens")]
    assert "law-000010" in long and int(reason.rpartition(" ")[2]) > 1800
    assert_same_files(tmp_path / "run", trained, "authorities.json")


def test_a_dry_run_with_a_quantised_base_loads_no_model(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("qat_lora.quant.student.load_model", None)
    train("--output-dir", tmp_path / "run", "--quantize", "int4/g32", "--dry-run")
    said = capsys.readouterr().out
    assert said.count("\nmemory of a worker") == 1 and " total " in said
    assert not (tmp_path / "run").exists()


def test_without_a_hub_a_wrong_dataset_error_names_generated(refusal, sharp_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    said = refusal("train_cot_sft", "--model", sharp_model_dir, *SMALL, "--dataset", "generate")
    assert said.endswith('; use "generated" or a local .jsonl or .parquet file\n')


def test_two_workers_equal_one(train, forks, sharp_model_dir, tmp_path):
    train("--lora-dropout", 0, "--output-dir", tmp_path / "one")
    two = ["--lora-dropout", 0, "--accumulation-steps", 1, "--output-dir", tmp_path / "two"]
    forks.pair("train_cot_sft", "--model", sharp_model_dir, *SMALL, *two)
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two) > 6
    for a, b in zip(one, two):
        assert a.pop("stage") == b.pop("stage") and a == pytest.approx(b, rel=1e-4)
    assert_same_files(tmp_path / "one", tmp_path / "two", "final_evaluation.json")
    assert apart(*(tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "two"))) <= 1e-6


def test_wandb_names_the_project(train, tmp_path, monkeypatch):
    """--wandb PROJECT, which is older than --report-to, means --report-to wandb."""
    wandb = Mock()
    wandb.init.return_value = wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train("--output-dir", tmp_path / "run", *SHORT, "--wandb", "law")
    assert wandb.init.call_args.kwargs["project"] == "law"
    assert wandb.log.called


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--method qlora", "'qlora' is not one of lora, rslora, full"), ("--lora-r 0", "--lora-r 0 must be at least 1"),
        ("--checkpoint absent.pt", "absent.pt: no such file"), ("--quantize int9", "int9"),
        ("--section-weights verdict=2", "'verdict=2' is not NAME=WEIGHT"),
        ("--section-weights answer=-1", "'answer=-1'"), ("--length 513", "exceeds the 512 positions"),
        ("--accumulation-steps 100", "an update of 400 rows"), ("--dataset-split test", "--dataset-split test needs"),
        ("--length 100", "no example fits"), ("--dataset none.jsonl", "none.jsonl: no such file"),
        ("--max-new-tokens 300", "--max-prompt-length and --max-new-tokens"),
        ("--max-prompt-length 20", "no held-out question fits --max-prompt-length 20"),
        ("--section-weights answer=2,citation=0", "citation=0 would also give the end of the answer no loss"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(refusal, sharp_model_dir, tmp_path, flags, part):
    flags = ["--model", sharp_model_dir, *SMALL, "--output-dir", tmp_path / "run", *flags.split()]
    assert part in refusal("train_cot_sft", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, part",
    [
        ({"answer": ""}, "rows law-000001, law-000002, law-000003"),
        ({"question": "Same?", "topic": "same"}, "one group of near-duplicates"),
    ],
)
def test_bad_rows_are_refused(refusal, sharp_model_dir, tmp_path, change, part):
    rows = [row | change for row in generate(60, 0)]
    file = tmp_path / "law.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", sharp_model_dir, *SMALL, "--output-dir", tmp_path / "run", "--dataset", file]
    assert part in refusal("train_cot_sft", *flags)
    assert not (tmp_path / "run").exists()
