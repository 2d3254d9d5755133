"""Models that are not whole are refused, not filled up at random."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qat_lora.errors import UserError
from qat_lora.models.loading import load_model, load_tokenizer


@pytest.fixture
def folder(sharp_model_dir, tmp_path):
    return shutil.copytree(sharp_model_dir, tmp_path / "model")


def test_a_file_without_one_of_the_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"its file lacks {name} and 0 more"):
        load_model(str(folder))


def test_a_tensor_of_another_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"cannot be loaded: model\.norm\.weight is \(3,\) in its file, \(64,\) by its config"):
        load_model(str(folder))


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(folder))
