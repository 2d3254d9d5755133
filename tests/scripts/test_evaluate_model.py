"""evaluate_model.py: accuracy of models, students and exports, where it is kept, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch
from small import CPU
from students import student_of

from qat_lora.data.tasks import TASKS, local_task
from qat_lora.errors import ROOT
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.quant.student import StudentSpec, save_student

ITEMS = ["--items", 24, *CPU]


@pytest.fixture(scope="module")
def student(sharp_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    spec = StudentSpec("int4/g32", "int4/g32")
    save_student(folder / "best.pt", student_of(str(sharp_model_dir), spec), str(sharp_model_dir), spec, {})
    return folder / "best.pt"


def results(run, path, *flags):
    run("evaluate_model", *flags, *ITEMS, "--output", path)
    return json.loads(path.read_text())


@torch.no_grad()
def right(model, tokenizer, question) -> bool:
    """Whether the correct choice has the largest likelihood, token by token."""
    scores = []
    for choice in question["choices"]:
        start = tokenizer(question["context"])["input_ids"]
        whole = tokenizer(f"{question['context']} {choice}")["input_ids"]
        found = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        scores.append(sum(found[i - 1, whole[i]].item() for i in range(len(start), len(whole))))
    return max(range(len(scores)), key=scores.__getitem__) == question["answer"]


def test_accuracy_is_the_share_of_questions_whose_answer_is_likeliest(run, sharp_model_dir, tmp_path):
    found = results(run, tmp_path / "r.json", "--model", sharp_model_dir)
    model, tokenizer = load_model(str(sharp_model_dir)), load_tokenizer(str(sharp_model_dir))
    assert found.keys() == TASKS.keys()
    for name in TASKS:
        questions = local_task(name, 24)["custom_dataset"]()["test"]
        share = sum(right(model, tokenizer, question) for question in questions) / 24
        assert found[name]["items"] == 24 and found[name]["metrics"]["acc"][0] == pytest.approx(share)


def test_a_student_and_its_export_answer_the_same(run, student, tmp_path):
    ours = results(run, tmp_path / "a.json", "--checkpoint", student)
    run("export_model", "--checkpoint", student, "--format", "hf", "--output-dir", tmp_path / "hf")
    theirs = results(run, tmp_path / "b.json", "--model", tmp_path / "hf")
    assert {name: held["metrics"] for name, held in ours.items()} == {n: held["metrics"] for n, held in theirs.items()}


def test_a_task_in_yaml_and_examples_before_questions(run, student, tmp_path):
    rows = [{"q": f"{i} is", "a": i % 2} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_choice: [even, odd]\n"
        "doc_to_target: a\nfewshot_split: test\nmetric_list: [{metric: acc}]\n"
    )
    found = results(
        run, tmp_path / "r.json", "--checkpoint", student, "--tasks", f"{tmp_path}/own.yaml,recall", "--shots", 2
    )
    assert found["own"]["items"] == 8 and found["own"]["shots"] == 2 and found["recall"]["items"] == 24


def test_results_are_kept_in_the_run_of_the_student_and_shown_in_its_report(run, student, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "best.pt").write_bytes(student.read_bytes())
    manifest = {"experiment": "train_qat", "started": "now", "device": "cpu", "git": "0", "dirty": False, "argv": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "stage": "qat", "loss": 1.0}\n{"step": 2, "stage": "qat", "loss": 0.5}\n'
    )
    (folder / "config.yaml").write_text("seed: 0\n")
    for tasks in ("recall", "agreement"):  # the second adds to the first
        run("evaluate_model", "--checkpoint", folder / "best.pt", "--tasks", tasks, *ITEMS)
    found = json.loads((folder / "tasks.json").read_text())
    assert found.keys() == {"recall", "agreement"}
    run("report_run", "--run", folder)
    page = (folder / "report.html").read_text()
    assert "<h2>Tasks</h2>" in page and f"{found['recall']['metrics']['acc'][0]:.4f}" in page


@pytest.mark.parametrize("flags, said", [
    (["--tasks", "nonsense"], "--tasks nonsense is not a task of lm_eval"),
    (["--tasks", " ,"], "names no task; local ones: agreement, recall, docstring"),
    (["--items", 0], "--items 0 must be at least 1"),
    (["--output", "nowhere/results.json"], "--output nowhere/results.json is not a file in a folder that exists"),
    (["--model", "mlx"], "is an mlx folder, which runs on a Mac: mlx_lm.evaluate"),
    (["--model", "packed"], "compressed-tensors"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(run, refuse, student, tmp_path, flags, said):
    formats = {"mlx": "mlx", "packed": "compressed-tensors"}
    if flags[-1] in formats:
        run("export_model", "--checkpoint", student, "--format", formats[flags[-1]], "--output-dir", tmp_path / "out")
        flags = ["--model", tmp_path / "out"]
    assert said in refuse("evaluate_model", *flags, *CPU)


@pytest.mark.xla
def test_batches_of_one_shape_on_xla_give_the_same_answers(run, sharp_model_dir, tmp_path):
    here = results(run, tmp_path / "cpu.json", "--model", sharp_model_dir)
    command = [sys.executable, ROOT / "scripts/evaluate_model.py", "--model", sharp_model_dir, "--items", 24]
    command += ["--device", "xla", "--output", tmp_path / "xla.json"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=os.environ | {"PJRT_DEVICE": "CPU"})
    there = json.loads((tmp_path / "xla.json").read_text())
    for name in TASKS:
        assert there[name]["device"] == "xla" and there[name]["metrics"] == here[name]["metrics"]


def test_an_adapter_is_evaluated_on_its_student(run, tiny_student, make_adapter, tiny_model_dir, tmp_path):
    adapter = make_adapter(tiny_model_dir)
    found = results(run, tmp_path / "r.json", "--checkpoint", tiny_student, "--adapter", adapter)
    assert found["recall"]["adapter"] == str(adapter) and found["recall"]["items"] == 24


@pytest.mark.peer
def test_a_gguf_file_answers_in_llama_cpp_as_its_student_does_here(run, student, tmp_path):
    """It rounds the inputs of products to 8 bits, so one question in twelve may differ."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; make setup-peers builds it")
    here = results(run, tmp_path / "a.json", "--checkpoint", student)
    run("export_model", "--checkpoint", student, "--format", "gguf", "--output-dir", tmp_path / "gguf")
    there = results(run, tmp_path / "b.json", "--model", tmp_path / "gguf" / "model.gguf")
    for name in TASKS:
        assert abs(there[name]["metrics"]["acc"][0] - here[name]["metrics"]["acc"][0]) < 2.5 / 24
