"""The legal fine-tune on the tiny model: files of a run, resuming after a kill, two workers, bad input."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from qat_lora.errors import UserError
from qat_lora.experiments.legal.rules import generate
from qat_lora.lora.adapter import load_adapter
from qat_lora.models.loading import load_model
from qat_lora.quant.student import load_student
from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--count 60 --length 512 --batch-size 4 --accumulation-steps 2 --epochs 1 --lora-r 4 --eval-every 3 "
SMALL += "--eval-answers 2 --final-answers 3 --answer-rows 2 --max-new-tokens 6 --save-every 2 --log-every 1 "
SMALL = (SMALL + "--device cpu --precision fp32").split()


@pytest.fixture(scope="module")
def run(load_script, sharp_model_dir):
    """run(*flags): main(parse(flags)) for a small run on the sharp tiny model."""

    def main(*flags) -> None:
        module = load_script("train_cot_sft")
        argv = ["--model", str(sharp_model_dir), *SMALL, *map(str, flags)]
        module.main(parse(module.Config, "train_cot_sft", argv))

    return main


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("law") / "whole"
    run("--output-dir", folder, "--section-weights", "answer=2,topic=0.5")
    return folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines(folder)]


def test_the_files_of_a_finished_run(trained):
    assert {path.name for path in trained.iterdir()} >= {
        "config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "data.json", "authorities.json",
        "baseline_evaluation.json", "final_evaluation.json", "adapter", "model", "checkpoints",
    }  # fmt: skip
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["merged_logit_gap"] <= 1e-4
    assert {"format", "accuracy", "citation_recall", "invented"} <= set(summary["final"])
    measured = [line for line in lines(trained) if "heldout_nll" in line]
    names = {f"{name}_ppl" for name in ("heldout", "topic", "difficulty", "reasoning", "answer", "citation")}
    assert all(names | {"format", "accuracy", "invented"} <= line.keys() for line in measured)
    assert measured[-1]["heldout_nll"] < measured[0]["heldout_nll"]
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
def test_a_mixture_of_experts_is_merged_too(run, full_model_dir, tmp_path, capsys, kind, quantize):
    """The experts do not change. The check in fp64 works, too, although torch's grouped matrix product rejects fp64."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_local_experts=4, num_experts_per_tok=2, vocab_size=512,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    base = full_model_dir(transformers.AutoModelForCausalLM.from_config(config))
    flags = ["--final-answers", 0, "--eval-every", 0, "--eval-answers", 0, "--count", 40, "--quantize", quantize]
    run("--model", base, "--output-dir", tmp_path / "run", *flags)
    said = capsys.readouterr().out
    assert "adapter: 8 layers (q_proj, k_proj, v_proj, o_proj in each of 2 blocks)" in said
    assert "experts are left as they are\n" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["merged_logit_gap"] <= 1e-4
    student = load_student(tmp_path / "run" / "base.pt")[0] if quantize != "none" else load_model(str(base))
    whole = load_model(str(tmp_path / "run" / "model"))
    before, after = student.state_dict(), whole.state_dict()
    assert all(
        torch.equal(before[name], value) == ("self_attn" not in name or "norm" in name) for name, value in after.items()
    )


@pytest.mark.parametrize("at", [4, 5])
def test_a_killed_run_resumes_to_the_same_end(run, trained, tmp_path, dies_at, at):
    """Killed at a checkpoint and right after one: losses, figures and weights are equal bit for bit."""
    flags = ["--output-dir", tmp_path / "run", "--section-weights", "answer=2,topic=0.5"]
    with dies_at(at):
        run(*flags)
    torch.manual_seed(7)
    run(*flags, "--resume", "auto")
    assert without_time(tmp_path / "run") == without_time(trained)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors", "final_evaluation.json"):
        assert (tmp_path / "run" / file).read_bytes() == (trained / file).read_bytes(), file
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 2


def test_resuming_on_a_base_with_other_weights_is_refused(run, trained, sharp_model_dir, tiny_model_dir, tmp_path):
    shutil.copytree(sharp_model_dir, tmp_path / "base")
    flags = ["--model", tmp_path / "base", "--output-dir", tmp_path / "run", "--eval-answers", 0, "--final-answers", 0]
    run(*flags)
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copy(tiny_model_dir / "model.safetensors", tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match="run of another config: base is"):
        run(*flags, "--resume", "auto")


def test_files_that_a_killed_process_left_incomplete_are_written_again(run, trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "summary.json").unlink()
    (folder / "model" / "model.safetensors").write_text("x")
    flags = ["--output-dir", folder, "--section-weights", "answer=2,topic=0.5", "--resume", "auto"]
    run(*flags)
    whole = "model/model.safetensors"
    assert (folder / whole).read_bytes() == (trained / whole).read_bytes()
    (folder / "summary.json").unlink()
    for stage in ("baseline", "final"):
        (folder / f"{stage}_evaluation.json").write_text("{}")
    run(*flags)
    for stage in ("baseline", "final"):
        name = f"{stage}_evaluation.json"
        assert (folder / name).read_bytes() == (trained / name).read_bytes()


def test_full_training_trains_every_parameter(run, sharp_model_dir, tmp_path):
    run("--output-dir", tmp_path / "run", "--method", "full", "--final-answers", 0, "--eval-answers", 0, "--keep", 1)
    before = load_file(sharp_model_dir / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    assert not (tmp_path / "run" / "adapter").exists()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


def test_a_quantised_base_is_kept_and_its_adapter_is_bound_to_it(run, load_script, tmp_path, capsys):
    folder = tmp_path / "run"
    run("--output-dir", folder, "--quantize", "int4/g32", "--method", "rslora", "--final-answers", 0)
    student, made = load_student(folder / "base.pt")
    assert made["spec"]["mlp"] == made["spec"]["attn"] == "int4/g32"
    adapted = load_adapter(student, folder / "adapter", folder / "base.pt")
    scaling = next(m.scaling["default"] for m in adapted.modules() if hasattr(m, "lora_A"))
    assert scaling == 64 / 4**0.5, "rsLoRA"
    with pytest.raises(UserError, match="a quantised student"):
        load_adapter(load_model(str(folder / "model")), folder / "adapter")
    module = load_script("run_legal_assistant")
    capsys.readouterr()
    module.main(
        parse(
            module.Config, "run_legal_assistant", ["--run", str(folder), "--question", "Until when?", "--device", "cpu"]
        )
    )
    assert f"+ {folder / 'adapter'}" in capsys.readouterr().out
    assert module.from_run(module.Config(run=str(folder))).max_new_tokens == 6, "as in its evaluation"
    assert module.from_run(module.Config(run=str(folder), max_new_tokens=3)).max_new_tokens == 3


def test_a_file_with_the_same_columns_works_like_generated_data(run, tmp_path, trained):
    rows = list(generate(60, 0))
    rows[7] = rows[7] | {"question": rows[3]["question"]}  # a duplicate
    rows[9] = rows[9] | {"reasoning": "Step 1: " + "and so on " * 600}  # too long
    file = tmp_path / "law.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("--dataset", file, "--output-dir", tmp_path / "run", "--final-answers", 0, "--eval-answers", 0)
    left_out = json.loads((tmp_path / "run" / "data.json").read_text())["left_out"]
    assert left_out["the same question as an earlier row"] == ["law-000008"]
    ((reason, long),) = [found for found in left_out.items() if found[0].startswith("longer than 512 tokens")]
    assert "law-000010" in long and int(reason.rpartition(" ")[2]) > 1800
    same = json.loads((tmp_path / "run" / "authorities.json").read_text())
    assert same == json.loads((trained / "authorities.json").read_text())


def test_a_dry_run_with_a_quantised_base_loads_no_model(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("qat_lora.quant.student.load_model", None)
    run("--output-dir", tmp_path / "run", "--quantize", "int4/g32", "--dry-run")
    said = capsys.readouterr().out
    assert said.count("\nmemory of a worker") == 1 and " total " in said
    assert not (tmp_path / "run").exists()


def test_without_a_hub_a_wrong_dataset_error_names_generated(refusal, sharp_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    said = refusal("train_cot_sft", "--model", sharp_model_dir, *SMALL, "--dataset", "generate")
    assert said.endswith('; use "generated" or a local .jsonl or .parquet file\n')


def test_two_workers_equal_one(sharp_model_dir, tmp_path):
    """Losses, held-out figures, answers and weights are equal at the same number of rows per update."""
    flags = ["--model", sharp_model_dir, *SMALL, "--lora-dropout", 0]
    for name, more in (("one", []), ("two", ["--num-chips", 2, "--accumulation-steps", 1])):
        command = [sys.executable, ROOT / "scripts/train_cot_sft.py", *flags, *more, "--output-dir", tmp_path / name]
        done = subprocess.run(
            list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = without_time(tmp_path / "one"), without_time(tmp_path / "two")
    assert len(one) == len(two) > 6
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        assert [v for v in a.values() if v != "sft"] == pytest.approx([v for v in b.values() if v != "sft"], rel=1e-4)
    said = [json.loads((tmp_path / name / "final_evaluation.json").read_text()) for name in ("one", "two")]
    assert said[0] == said[1]
    weights = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two")]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) <= 1e-5


def test_wandb_names_the_project(run, tmp_path, monkeypatch):
    """--wandb PROJECT, which is older than --report-to, means --report-to wandb."""
    sent = []

    class Wandb:
        @classmethod
        def init(cls, **settings):
            assert settings["project"] == "law"
            return cls

        @staticmethod
        def log(values, step):
            sent.append({"step": step, **values})

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    run("--output-dir", tmp_path / "run", "--final-answers", 0, "--eval-answers", 0, "--wandb", "law")
    assert sent == lines(tmp_path / "run")


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--method qlora", "'qlora' is not one of lora, rslora, full"), ("--lora-r 0", "--lora-r 0 must be at least 1"),
        ("--lora-dropout 1", "--lora-dropout 1.0 must be at least 0 and below 1"),
        ("--quantize int4/g32 --method full", "freezes the base"),
        ("--quantize int9", "int9"), ("--section-weights verdict=2", "'verdict=2' is not NAME=WEIGHT"),
        ("--section-weights answer=-1", "'answer=-1'"), ("--section-weights answer=1e39", "'answer=1e39'"),
        ("--accumulation-steps 100", "an update of 400 rows"), ("--dataset-split test", "--dataset-split test needs"),
         ("--epochs 0", "--epochs 0"),
        ("--length 100", "no example fits"), ("--length 513", "exceeds the 512 positions"),
        ("--max-new-tokens 300", "--max-prompt-length and --max-new-tokens"),
        ("--max-prompt-length 20", "no held-out question fits --max-prompt-length 20"),
        ("--batch-size 500", "an update of 1000 rows"), ("--batch-size 0", "--batch-size 0 must"),
        ("--accumulation-steps 0", "--accumulation-steps 0"), ("--heldout-fraction 0", "--heldout-fraction 0"),
        ("--count 0", "--count 0"), ("--dataset none.jsonl", "none.jsonl: no such file"), ("--keep 0", "--keep 0"),
        ("--answer-rows 0", "--answer-rows 0"), ("--weight-decay -1", "--weight-decay -1"),
        ("--lora-alpha 0", "alpha 0"), ("--lora-alpha 1e30", "alpha 1e+30"),
        ("--weight-decay 1e30", "--weight-decay 1e+30 must be from 0 to 1,000"),
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
        ({"answer": None}, "no column answer"),
        ({"answer": ""}, "rows law-000001, law-000002, law-000003"),
        ({"id": "x"}, "rows x: the id occurs twice"),
        ({"question": "Same?", "topic": "same"}, "one group of near-duplicates"),
    ],
)
def test_bad_rows_are_refused(refusal, sharp_model_dir, tmp_path, change, part):
    rows = [{k: v for k, v in (row | change).items() if v is not None} for row in generate(60, 0)]
    file = tmp_path / "law.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", sharp_model_dir, *SMALL, "--output-dir", tmp_path / "run", "--dataset", file]
    assert part in refusal("train_cot_sft", *flags)
    assert not (tmp_path / "run").exists()
