"""One update, ties, randomness and prefetch on the CPU: the reference that the XLA backend must match."""

import contextlib
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from loops import one_update
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.data.packing import Rows, TextDataset
from qat_lora.models.loading import load_model
from qat_lora.train.loop import Plan
from qat_lora.train.losses import text_loss


# -- ties ------------------------------------------------------------------------------------------------------------
class Untying(TorchBackend):
    """Moves a module as XLA does: every parameter slot gets its own tensor."""

    def place(self, module):
        move = module.to

        def to(device):
            for part in module.modules():
                for name, p in list(part.named_parameters(recurse=False)):
                    setattr(part, name, nn.Parameter(p.detach().clone()))
            return move(device)

        module.to = to
        return super().place(module)


def test_place_keeps_ties_that_moving_breaks(tiny_model_dir):
    model = load_model(str(tiny_model_dir))
    count = len(list(model.parameters()))
    assert Untying("cpu", "fp32").place(model).lm_head.weight is model.model.embed_tokens.weight
    assert len(list(model.parameters())) == count


# -- one update ------------------------------------------------------------------------------------------------------
def one(*gradient):
    """A parameter at 0 with this gradient, and its optimiser, whose step subtracts the gradient."""
    p = nn.Parameter(torch.zeros(len(gradient)))
    p.grad = torch.tensor(gradient)
    return p, torch.optim.SGD([p], lr=1.0)


@pytest.mark.parametrize("clip", [0.0, 5.0, 100.0])
def test_clip_leaves_small_gradients_alone(backend, clip):
    p, optimizer = one(3.0, 4.0)
    backend.update(optimizer, clip)
    assert p.tolist() == pytest.approx([-3.0, -4.0], rel=1e-5)


def test_update_clips_over_all_groups_returns_the_norm_before_and_clears_gradients(backend):
    (a, _), (b, _) = one(3.0), one(4.0)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 10.0}], lr=1.0)
    assert backend.update(optimizer, clip=1.0).item() == pytest.approx(5.0)
    assert (a.item(), b.item()) == pytest.approx((-0.6, -8.0), rel=1e-5)
    assert a.grad is b.grad is None


@pytest.mark.parametrize("mine, other", [((100.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (100.0, 0.0))])
def test_clip_comes_after_reduce(backend, monkeypatch, mine, other):
    """Two workers with skewed gradients step as one worker would with their mean; clipping first would not."""
    p, optimizer = one(*mine)
    monkeypatch.setattr(backend, "reduce", lambda tensors: tensors[0].add_(torch.tensor(other)).div_(2))
    backend.update(optimizer, clip=1.0)
    assert p.tolist() == pytest.approx([-50 / 2500.25**0.5, -0.5 / 2500.25**0.5], rel=1e-5)


def text() -> TextDataset:
    """Random rows; the mask keeps a different share of each."""
    tokens = torch.randint(512, (8, 12), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    mask = (torch.arange(12) < torch.arange(4, 12).unsqueeze(1)).to(torch.uint8)
    return TextDataset(Rows(tokens, mask), completions_only=True)


@pytest.mark.parametrize("size, accumulation", [(2, 2), (1, 4)])
def test_accumulation_equals_one_large_batch(backend, tiny_model_dir, size, accumulation):
    """k micro-batches of b rows give the step of k·b rows, even if rows have different numbers of target tokens."""

    def train(batch_size, accumulation):
        model = load_model(str(tiny_model_dir))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = Plan(4, batch_size, accumulation, 0.5, 0, 1.0, seed=5)
        stream = backend.prefetch(batches(text(), batch_size, accumulation, plan.seed))
        figures = [one_update(model, stream, text_loss, optimizer, plan, backend) for _ in range(plan.steps)]
        return model, [line[name].item() for line in figures for name in ("loss", "grad_norm")]

    (model, figures), (large, its) = train(size, accumulation), train(4, 1)
    assert figures == pytest.approx(its, rel=1e-5)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), large.parameters()))


# -- randomness ------------------------------------------------------------------------------------------------------
def draw() -> list:
    return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1)]


def test_seed_sets_every_generator(backend):
    backend.seed(3)
    first = draw()
    backend.seed(3)
    assert draw() == first
    backend.seed(4)
    assert all(a != b for a, b in zip(draw(), first))


def test_rng_state_round_trip_through_a_file(backend, tmp_path):
    backend.seed(3)
    draw()  # an odd number of gauss() calls leaves a second value pending
    torch.save(backend.rng_state(), tmp_path / "rng.pt")
    wanted = draw()
    backend.seed(99)
    backend.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == wanted


# -- prefetch, fetch -------------------------------------------------------------------------------------------------
def numbers(count, seen):
    for n in range(count):
        seen.append(n)
        yield {"n": torch.tensor(n)}


def test_prefetch_keeps_the_order_and_ends(backend):
    assert [batch["n"].item() for batch in backend.prefetch(numbers(20, []))] == list(range(20))


def test_prefetch_reads_a_few_ahead(backend):
    seen = []
    stream = backend.prefetch(numbers(10**6, seen), depth=2)
    assert next(stream)["n"].item() == 0
    time.sleep(0.05)
    assert len(seen) <= 4
    stream.close()
    assert len(seen) <= 5


def busy():
    """Batches that take a while, so that the thread is inside torch whenever a test checks."""
    while True:
        yield {"n": torch.randn(300, 300) @ torch.randn(300, 300)}


def test_the_thread_has_ended_once_its_stream_is_closed(backend):
    """A thread inside torch while the interpreter shuts down would abort the process after a successful run."""
    before = threading.active_count()
    for _ in range(5):
        with contextlib.closing(backend.prefetch(busy())) as stream:
            next(stream)
        assert threading.active_count() <= before


EXIT = """
import sys, torch
from qat_lora.backend import TorchBackend

def busy():
    while True:
        yield {"n": torch.stack([torch.zeros(4)] * 64)}

stream = TorchBackend("cpu", "fp32").prefetch(busy(), depth=10**9)
next(stream)
sys.exit(0)
"""


def test_the_interpreter_exits_cleanly_while_batches_are_read():
    """As after SIGTERM or a UserError: the exception that ends the program keeps the stream alive."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exception_in_the_source_is_raised_at_its_position(backend):
    def source():
        yield from numbers(3, [])
        raise OSError("disk gone")

    got = []
    with pytest.raises(OSError, match="disk gone"):
        for batch in backend.prefetch(source()):
            got.append(batch["n"].item())
    assert got == [0, 1, 2]


def test_fetch_gives_host_floats(backend):
    values = [torch.tensor(1.5), torch.tensor([2.5], dtype=torch.bfloat16), torch.tensor(3, requires_grad=False)]
    found = backend.fetch(*values)
    assert found == [1.5, 2.5, 3.0] and all(type(value) is float for value in found)


def test_to_host_copies_nested_state(backend):
    copied = backend.to_host({"a": [torch.ones(1, requires_grad=True), 2], "b": (None, "x")})
    assert copied["b"] == [None, "x"] and copied["a"][1] == 2
    assert not copied["a"][0].requires_grad


# -- recomputation ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "lora"])
def test_gradient_checkpointing_changes_no_gradient(backend, tiny_model_dir, frozen):
    from qat_lora.lora.add import add_adapter

    def gradients(checkpointing):
        torch.manual_seed(0)
        model = load_model(str(tiny_model_dir))
        if frozen:
            model = add_adapter(model.requires_grad_(False), 2, 2, ("q", "down"), seed=0)
        if checkpointing:
            backend.gradient_checkpointing(model)
        model.train()
        calls = []
        layer = next(m for m in model.modules() if type(m).__name__ == "LlamaMLP")
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        text_loss(model, {key: value.unsqueeze(0) for key, value in text()[3].items()}).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(calls)

    (plain, once), (recomputed, twice) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == recomputed.keys() and plain
    assert [name for name in plain if not torch.equal(plain[name], recomputed[name])] == []


# -- copying to a GPU ------------------------------------------------------------------------------------------------
def test_batches_are_pinned_only_for_cuda(backend, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = {"tokens": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    assert next(iter(backend.prefetch([batch]))).keys() == batch.keys() and pinned == []
    monkeypatch.setattr(backend, "kind", "cuda")
    assert backend.staged(batch).keys() == batch.keys() and len(pinned) == 2
