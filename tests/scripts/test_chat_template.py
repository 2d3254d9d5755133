"""Base models without a chat template in every script that renders conversations; BOS tokens; several templates."""

import json
import shutil

import pytest
import torch
from small import CPU
from transformers import AutoTokenizer

from qat_lora.kd.dataset import KDCacheDataset

LAW = "--count 40 --length 512 --batch-size 2 --accumulation-steps 1 --epochs 0.1 --lora-r 2 --eval-answers 0 "
LAW = (LAW + "--final-answers 1 --answer-rows 1 --max-new-tokens 2").split()
BOB = "--num-samples 4 --epochs 1 --sft-only --sft-epochs 1 --sft-batch-size 4 --max-prompt-length 200 "
BOB = (BOB + "--max-completion-length 4 --validation-samples 1").split()


@pytest.fixture(scope="module")
def base_dir(sharp_model_dir, tmp_path_factory):
    """A base model without a chat template, whose only special token is its EOS, <|pad|>."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(sharp_model_dir, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|pad|>"
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    talk = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}]
    path.write_text((json.dumps({"messages": talk}) + "\n") * 200)
    return path


@pytest.fixture
def scripts(chats, tmp_path):
    """Flags for every script that renders conversations; dry runs for those that train."""
    text = ["--dataset", chats, "--length", 32]
    return {
        "build_kd_cache": [*text, "--max-rows", 8, "--cache-dir", tmp_path / "c", "--dry-run"],
        "measure_perplexity": [*text, "--max-windows", 1],
        "train_cot_sft": [*LAW, "--output-dir", tmp_path / "r", "--dry-run"],
        "train_musclebob_improved": [*BOB, "--output-dir", tmp_path / "r", "--dry-run"],
        "run_inference": ["--prompt", "Hi", "--max-new-tokens", 2],
        "run_legal_assistant": ["--question", "Hi", "--max-new-tokens", 2],
    }


def test_the_error_names_the_chat_template_option(refuse, base_dir, scripts, tmp_path):
    for script, flags in scripts.items():
        real = [flag for flag in flags if flag != "--dry-run"]
        assert "--chat-template" in refuse(script, "--model", base_dir, *real, "--device", "cpu")
    assert not (tmp_path / "r").exists()


def test_a_base_model_renders_chat_rows_with_a_given_template(run, base_dir, scripts, tmp_path, capsys):
    template = ["--model", base_dir, "--chat-template", "llama3", *CPU]
    run("build_kd_cache", *template, *scripts["build_kd_cache"], "--dry-run", "false")
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    said = tokenizer.decode(torch.cat([item["tokens"] for item in KDCacheDataset(tmp_path / "c")]))
    assert "<|end_header_id|>\n\nIt is 4.<|pad|><|start_header_id|>user" in said
    run("measure_perplexity", *template, *scripts["measure_perplexity"])
    run("run_inference", *template, *scripts["run_inference"])
    assert "PPL" in capsys.readouterr().out


def test_a_legal_fine_tune_of_a_base_model_saves_its_template(run, refuse, base_dir, tmp_path):
    template = tmp_path / "law.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    flags = ["--model", base_dir, *LAW, *CPU, "--output-dir", tmp_path / "r"]
    run("train_cot_sft", *flags, "--chat-template", template)
    assert AutoTokenizer.from_pretrained(tmp_path / "r" / "model").chat_template == template.read_text()
    moved = template.rename(tmp_path / "moved.jinja")
    with pytest.raises(SystemExit):  # finished: the same template under another path counts as the same run
        run("train_cot_sft", *flags, "--chat-template", moved, "--resume", "auto")
    moved.write_text(moved.read_text().replace(": ", "> "))
    assert "is a run of another config" in refuse("train_cot_sft", *flags, "--chat-template", moved, "--resume", "auto")
    run("run_legal_assistant", "--run", tmp_path / "r", "--question", "When?", "--device", "cpu")


def test_a_musclebob_fine_tune_of_a_base_model_saves_its_template(run, base_dir, tmp_path, capsys):
    flags = ["--model", base_dir, *BOB, *CPU, "--output-dir", tmp_path / "r", "--chat-template", "chatml"]
    run("train_musclebob_improved", *flags)
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(tmp_path / "r" / "model").chat_template
    run("test_musclebob", "--run", tmp_path / "r", "--samples", 1, "--device", "cpu")
    assert "| musclebob |" in capsys.readouterr().out


def test_sft_with_bos_saves_a_tokenizer_that_adds_one_bos(run, base_dir, tmp_path):
    folder = shutil.copytree(base_dir, tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    flags = ["--model", folder, *LAW, *CPU, "--output-dir", tmp_path / "r", "--chat-template", "llama3"]
    run("train_cot_sft", *flags, "--bos", "on")
    saved = AutoTokenizer.from_pretrained(tmp_path / "r" / "model")
    asked = saved.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert asked[0] == saved.bos_token_id and asked.count(saved.bos_token_id) == 1


# -- the tokenizer's own templates: several with names, and one that opens a thought -----------------------------------
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + eos_token }}"
    "{% endfor %}"
)
OPENS = TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
PLAIN = TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def with_template(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_template_that_opens_a_thought_works_with_and_without_thinking(run, base_dir, scripts, tmp_path):
    folder = with_template(shutil.copytree(base_dir, tmp_path / "opens"), OPENS)
    for script, flags in scripts.items():
        for thinking in ("on", "off"):
            run(script, "--model", folder, *flags, "--thinking", thinking, "--device", "cpu")
    run("train_cot_sft", "--model", folder, *LAW, *CPU, "--output-dir", tmp_path / "r")
    run("run_legal_assistant", "--run", tmp_path / "r", "--question", "When?", "--device", "cpu")


def test_named_templates_without_a_default_are_chosen_by_name(run, refuse, base_dir, scripts, tmp_path):
    folder = with_template(shutil.copytree(base_dir, tmp_path / "named"), {"plain": PLAIN, "tool_use": OPENS})
    for script, flags in scripts.items():
        flags = ["--model", folder, *flags, "--device", "cpu"]
        said = refuse(script, *flags)
        assert "named plain, tool_use and no default" in said and "--chat-template plain" in said
        run(script, *flags, "--chat-template", "plain")
