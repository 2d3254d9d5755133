"""The reservoir model and its baselines have equal parameter counts, are causal, and can carry their state."""

import dataclasses
import math

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.experiments.stories.evaluation import heldout, story_loss, tell
from qat_lora.experiments.stories.models import Shape, build, trained
from qat_lora.experiments.stories.reservoir import ReservoirSpec
from qat_lora.experiments.stories.text import load_stories
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.rl.rollout import Sampling

MODELS = ("reservoir", "transformer", "mingru")
SHAPE = Shape(32, 2, 80, (ReservoirSpec(24), ReservoirSpec(20, "esn", radius=0.9)))


@pytest.fixture(params=[*MODELS, "reservoir and attention"])
def model(request):
    kind, _, attention = request.param.partition(" ")
    return build(kind, 50, dataclasses.replace(SHAPE, window=16 if attention else 0), seed=0).eval()


@pytest.fixture
def stories(tmp_path):
    (tmp_path / "s.txt").write_text("\n".join(f"The cat number {n} sat." for n in range(60)))
    return load_stories(str(tmp_path / "s.txt"), 1, 0.2, "chars", 0)


def test_baselines_have_as_many_trained_parameters():
    counts = {kind: trained(build(kind, 50, SHAPE, seed=0)) for kind in MODELS}
    assert all(count == pytest.approx(counts["reservoir"], rel=0.01) for count in counts.values()), counts


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_weights_depend_on_the_seed(seed):
    one, same, other = (build("reservoir", 50, SHAPE, seed).state_dict() for seed in (seed, seed, 2))
    assert all(torch.equal(one[n], same[n]) for n in one)
    for name in ("embedding.weight", "blocks.0.reservoirs.0.decay", "blocks.0.reservoirs.1.w"):
        assert not torch.equal(one[name], other[name])


def test_carrying_the_state_equals_one_pass_over_the_whole_text(model):
    """So models are causal, too."""
    tokens = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(1))
    whole, _ = model(tokens)
    state, parts = model.begin(2), []
    for part in (tokens[:, :11], tokens[:, 11:12], tokens[:, 12:]):
        hidden, state = model(part, state)
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_loss_is_cross_entropy(model):
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 11)
    mask[1, 5:] = 0
    logits = model(tokens[:, :-1])[0] @ model.embedding.weight.T
    nll = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    loss = story_loss(model, {"tokens": tokens, "mask": mask})
    assert loss.item() == pytest.approx(((nll * mask).sum() / mask.sum()).item(), rel=1e-5)


def test_heldout_metrics_cover_every_token(stories, backend):
    """A uniform model has log(vocabulary) nats/token."""
    model = build("reservoir", stories.vocab, SHAPE, seed=0)
    model.embedding.weight.data.zero_()
    found = heldout(model, stories, 16, 4, backend)
    assert found["heldout_nll"] == pytest.approx(math.log(stories.vocab), rel=1e-4)
    wanted = len(stories.heldout) * math.log2(stories.vocab) / stories.heldout_bytes
    assert found["bits_per_byte"] == pytest.approx(wanted, rel=1e-4)


def test_a_story_continues_its_prompt(stories, backend):
    model = backend.place(build("reservoir", stories.vocab, SHAPE, seed=0))
    backend.seed(1)
    told = tell(model, stories, stories.tokenizer.encode("The cat").ids, 20, Sampling(0.8, top_k=5, top_p=0.9), backend)
    assert told.startswith("The cat") and len(told) > 7
    assert tell(model, stories, [], 5, Sampling(0.0), backend) == tell(model, stories, [], 5, Sampling(0.0), backend)


def test_impossible_shapes_are_refused():
    for size in (30, 36):
        with pytest.raises(UserError):
            Shape(**vars(SHAPE) | {"embedding": size})
    with pytest.raises(UserError, match="--model transformer has at least"):
        build("transformer", 50, Shape(64, 2, 4, (ReservoirSpec(4),)), 0)


def test_training_changes_every_parameter_and_no_reservoir(stories, backend):
    model, drawn = (build("reservoir", stories.vocab, SHAPE, seed=0) for _ in range(2))
    backend.place(model)
    optimizer = new_optimizer(model, 0.1, backend)
    for _ in range(3):
        backend.backward(story_loss(model, {"tokens": stories.train[:40][None], "mask": torch.ones(1, 39)}))
        backend.update(optimizer, 1.0)
    buffers = dict(drawn.named_buffers())
    assert len(buffers) > 10 and all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not any(torch.equal(p, before) for p, before in zip(model.parameters(), drawn.parameters()))
    radii = [torch.linalg.eigvals(block.reservoirs[1].w).abs().max().item() for block in model.blocks]
    assert radii == pytest.approx([0.9, 0.9], rel=1e-4)


def test_all_reservoirs_differ():
    shape = Shape(16, 12, 8, (ReservoirSpec(6), ReservoirSpec(6), ReservoirSpec(8, "esn", density=0.5)))
    state = build("reservoir", 50, shape, 0).state_dict()
    drawn = [value.flatten()[:8].tolist() for name, value in state.items() if name.endswith(("decay", ".w", "w_in"))]
    assert len(drawn) == 72 and len(set(map(tuple, drawn))) == 72
