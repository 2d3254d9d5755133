"""A model's fingerprint changes with its content, but not with its location or the way it is stored."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qat_lora.errors import UserError
from qat_lora.models import identity
from qat_lora.models.loading import load_model, model_fingerprint
from qat_lora.models.source import speech_files


@pytest.fixture
def folder(sharp_model_dir, tmp_path):
    return shutil.copytree(sharp_model_dir, tmp_path / "m")


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_spelling_of_the_path_does_not_matter(folder, sharp_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    known = model_fingerprint(str(sharp_model_dir))
    assert {model_fingerprint(name) for name in ("m", "./m", str(folder), "link", "m/../m")} == {known}
    folder.rename(tmp_path / "moved")
    assert model_fingerprint("moved") == known == load_model("moved").fingerprint


def test_the_number_of_files_and_the_transformers_version_do_not_matter(folder, tmp_path, tiny_tokenizer):
    known = model_fingerprint(str(folder))
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="100KB")
    tiny_tokenizer.save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert model_fingerprint(str(sharded)) == known
    edit(folder / "config.json", transformers_version="4.1", _name_or_path="/x/y")
    (folder / "README.md").write_text("notes")
    assert model_fingerprint(str(folder)) == known


def test_any_change_changes_the_fingerprint(folder, monkeypatch):
    monkeypatch.setattr(identity, "BLOCK", 100)
    seen, tensors = [model_fingerprint(str(folder))], load_file(folder / "model.safetensors")
    for name, at in (("norm.weight", 0), ("layers.0.mlp.up_proj.weight", (3, 5))):
        tensors[f"model.{name}"][at] += 1e-3
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        seen.append(model_fingerprint(str(folder)))
    for name, change in (("config", {"rms_norm_eps": 1e-5}), ("tokenizer_config", {"eos_token": "<|pad|>"})):
        edit(folder / f"{name}.json", **change)
        seen.append(model_fingerprint(str(folder)))
    assert len(set(seen)) == len(seen)


def test_a_tensor_is_read_in_blocks_up_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "BLOCK", 64)
    value = torch.arange(1000, dtype=torch.int16)
    save_file({"x": value}, tmp_path / "a.safetensors")
    header = identity.headers([tmp_path / "a.safetensors"])["x"]
    assert b"".join(header.blocks()) == value.numpy().tobytes()
    assert [len(block) for block in header.blocks()] == [64] * 31 + [16]


def test_a_folder_without_a_model_has_no_fingerprint(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        model_fingerprint(str(tmp_path))


# -- files that determine how a model is prompted --------------------------------------------------------------------
def test_speech_files_do_not_depend_on_json_formatting(folder):
    known = speech_files(str(folder))
    assert known.keys() >= {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())) | {"transformers_version": "4.1"}))
    (folder / "README.md").write_text("notes")
    assert speech_files(str(folder)) == known


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_changed_or_missing_speech_file_is_detected(folder, name):
    known, path = speech_files(str(folder)), folder / name
    path.write_text(path.read_text().replace("im_end", "im_ent").replace("2", "3"))
    assert [file for file, total in speech_files(str(folder)).items() if total != known[file]] == [name]
    path.unlink()
    assert known.keys() - speech_files(str(folder)).keys() == {name}
