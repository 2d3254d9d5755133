"""A checkpoint is complete or absent; a damaged one is reported, and the one before it is used."""

import resource
from pathlib import Path

import pytest
import torch

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.run.checkpoint import KEEP, load_checkpoint, restore_files, save_checkpoint


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


def trained(steps: int = 3):
    """A tied model and its optimiser after a few updates."""
    torch.manual_seed(0)
    backend, model = TorchBackend("cpu", "fp32"), Tied()
    optimizer = new_optimizer(model, 0.1, backend)
    for _ in range(steps):
        model(torch.arange(6)).logsumexp(1).sum().backward()
        backend.update(optimizer, 1.0)
    return backend, model, optimizer


def save(run, step, value=0.0, **meta):
    return save_checkpoint(run, step, {"w": torch.full((3,), value)}, {"value": value}, meta)


def flip(path, at=1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def names(run) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# -- round trip ------------------------------------------------------------------------------------------------------
def test_training_from_a_loaded_checkpoint_equals_never_having_stopped(tmp_path):
    backend, model, optimizer = trained(3)
    state = {"optimizer": optimizer.state_dict(), "rng": backend.rng_state(), "interval": [{"loss": 0.1}], "none": None}
    tensors = backend.to_host(dict(model.named_parameters()))
    save_checkpoint(tmp_path, 3, tensors, backend.to_host(state), {"stage": "toy", "metrics_size": 17})
    loaded, trainer, meta = load_checkpoint(tmp_path)
    assert meta["step"] == 3 and meta["stage"] == "toy" and meta["metrics_size"] == 17
    assert trainer["interval"] == [{"loss": 0.1}] and trainer["none"] is None

    _, other, other_optimizer = trained(0)
    for name, parameter in other.named_parameters():
        parameter.data.copy_(loaded[name])
    other_optimizer.load_state_dict(trainer["optimizer"])
    for one, its in ((model, optimizer), (other, other_optimizer)):
        one(torch.arange(6)).logsumexp(1).sum().backward()
        backend.update(its, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_tied_tensors_are_saved_once_and_non_contiguous_ones_as_they_are(tmp_path):
    backend, model, _ = trained(1)
    transposed = torch.arange(6.0).view(2, 3).T
    save_checkpoint(tmp_path, 1, backend.to_host(dict(model.named_parameters())) | {"w": transposed}, {}, {})
    tensors = load_checkpoint(tmp_path)[0]
    assert tensors.keys() == {"embedding.weight", "norm.weight", "norm.bias", "w"}
    assert torch.equal(tensors["w"], transposed)


def test_trainer_state_holds_no_code(tmp_path):
    save_checkpoint(tmp_path, 2, {"w": torch.ones(1)}, {"x": print}, {})
    with pytest.raises(UserError, match=r"step_2: trainer\.pt is not a trainer state .*something other than tensors"):
        load_checkpoint(tmp_path)


def test_the_newest_checkpoint_and_one_to_fall_back_to_are_kept(tmp_path):
    for value, step in enumerate((2, 4, 9, 10, 10)):
        save(tmp_path, step, value)
    assert names(tmp_path) == ["LATEST", "step_10", "step_9"] and KEEP == 2
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_10"
    assert load_checkpoint(tmp_path)[1] == {"value": 4}, "the same step is replaced"


def test_a_run_without_checkpoints_loads_none(tmp_path):
    assert load_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert load_checkpoint(tmp_path) is None


# -- damage ----------------------------------------------------------------------------------------------------------
def test_a_half_written_checkpoint_is_removed_and_a_stray_folder_ignored(tmp_path):
    save(tmp_path, 1, 1.0)
    for name in (".part_2", "step_1 (copy)"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert load_checkpoint(tmp_path)[1] == {"value": 1.0}
    assert names(tmp_path) == ["LATEST", "step_1", "step_1 (copy)"]


DAMAGES = [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:2]), flip]


@pytest.mark.parametrize("damage", [*DAMAGES, lambda path: path.write_text("[]")])
@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "meta.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_even_twice(tmp_path, capsys, file, damage):
    save(tmp_path, 1, 1.0)
    for _ in range(2):  # the damaged checkpoint is set aside each time
        damage(save(tmp_path, 2, 2.0) / file)
        tensors, trainer, meta = load_checkpoint(tmp_path)
        assert tensors["w"].tolist() == [1.0] * 3 and trainer == {"value": 1.0} and meta["step"] == 1
        said = capsys.readouterr().out
        assert "step_2" in said and file in said and "trying the one before" in said


def test_if_all_checkpoints_are_damaged_the_error_says_what_to_do(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step) / "trainer.pt", 100)
    for _ in range(2):  # also after they were set aside: a run never silently starts from scratch
        with pytest.raises(UserError, match=r"no intact checkpoint.*--output-dir"):
            load_checkpoint(tmp_path)


# -- the files of a run that a checkpoint relies on ------------------------------------------------------------------
FILES = ("best.pt", "adapter")


def with_files(run, step: int, best: bytes, adapter: bytes):
    (run / "adapter" / "deep").mkdir(parents=True, exist_ok=True)
    (run / "best.pt").write_bytes(best)
    (run / "adapter" / "deep" / "weights").write_bytes(adapter)
    save_checkpoint(run, step, {"w": torch.ones(1)}, {}, {}, files=FILES)


def restore(run):
    meta = load_checkpoint(run)[2]
    restore_files(run, meta["files"], FILES, meta["step"])


def content(run) -> list[bytes]:
    return [(run / "best.pt").read_bytes(), (run / "adapter" / "deep" / "weights").read_bytes()]


@pytest.mark.parametrize("damage", [*DAMAGES, lambda path: path.write_bytes(b"of a later step")])
@pytest.mark.parametrize("name", ["best.pt", "adapter/deep/weights"])
def test_a_file_is_restored_to_its_state_at_the_checkpoint(tmp_path, name, damage):
    with_files(tmp_path, 1, b"first", b"one")
    damage(tmp_path / name)
    restore(tmp_path)
    assert content(tmp_path) == [b"first", b"one"]


def test_falling_back_to_an_earlier_checkpoint_restores_its_files(tmp_path):
    with_files(tmp_path, 1, b"first", b"one")
    with_files(tmp_path, 2, b"second", b"one")
    flip(tmp_path / "checkpoints" / "step_2" / "trainer.pt", 100)
    restore(tmp_path)
    assert content(tmp_path) == [b"first", b"one"]


def test_files_that_did_not_exist_at_the_checkpoint_are_removed(tmp_path):
    save_checkpoint(tmp_path, 1, {"w": torch.ones(1)}, {}, {}, files=FILES)
    (tmp_path / "best.pt").write_bytes(b"of later")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_bytes(b"of later")
    (tmp_path / "notes.txt").write_text("mine")
    restore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "notes.txt"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_lost_with_its_copy_is_refused_by_name(tmp_path, damage):
    with_files(tmp_path, 1, b"first", b"one")
    damage(next(path for path in (tmp_path / "checkpoints" / "files").iterdir() if path.read_bytes() == b"first"))
    restore(tmp_path)  # as long as the file itself is intact, its copy does not matter
    damage(tmp_path / "best.pt")
    with pytest.raises(UserError, match=r"best\.pt has changed since step 1 .*--output-dir"):
        restore(tmp_path)


def test_a_copy_is_stored_once_and_removed_with_its_checkpoints(tmp_path):
    for step, best in enumerate((b"a", b"a", b"b", b"c", b"c"), 1):
        with_files(tmp_path, step, best, b"one")
    assert {path.read_bytes() for path in (tmp_path / "checkpoints" / "files").iterdir()} == {b"c", b"one"}


# -- a full disk -----------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk():
    """No file of this process can grow beyond 64 kB (Python ignores the signal, and writes fail)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("big", ["tensors", "trainer"])
def test_a_full_disk_leaves_the_old_checkpoint_intact(tmp_path, big, small_disk):
    save(tmp_path, 1, 1.0)
    large = {"w": torch.zeros(2**18)}
    content = (large, {}) if big == "tensors" else ({"w": torch.zeros(1)}, large)
    with pytest.raises(UserError, match="step_2 could not be written"):
        save_checkpoint(tmp_path, 2, *content, {})
    assert names(tmp_path) == ["LATEST", "step_1"]
    assert load_checkpoint(tmp_path)[1] == {"value": 1.0}
