"""Sample answers to many conversations at once, with one static shape."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import whole
from qat_lora.data.batches import seed_of
from qat_lora.data.chat import after_thought, chat_ids, opens_thought, spoken
from qat_lora.rl.policy import Prompts
from qat_lora.rl.rollout import Sampling, rollout
from qat_lora.run.console import watched

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Sampler:
    """Generates about `rows` answers of at most `length` tokens at a time, from prompts of `prompt_length` tokens: one
    shape, so that on XLA its graphs are compiled only once."""

    tokenizer: object
    backend: TorchBackend
    ends: tuple[int, ...]
    rows: int
    prompt_length: int
    length: int
    thinks: bool = False  # whether the chat template renders with thinking on

    def encode(self, talks: Sequence[Sequence[dict]]) -> Prompts:
        """Conversations as the chat template renders them, ready for the assistant's answer. Raises UserError if the
        tokenizer has no template or a prompt does not fit."""
        return Prompts.of([self.prompt(talk) for talk in talks], self.prompt_length, self.tokenizer.eos_token_id)

    def prompt(self, talk: Sequence[dict]) -> list[int]:
        """The tokens of one conversation, of any length."""
        return chat_ids(list(talk), self.tokenizer, self.thinks)

    @cached_property
    def opened(self) -> bool:
        return opens_thought(self.tokenizer, self.thinks)

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer, without its thought if there is one."""
        return after_thought(self.tokenizer.decode(spoken(self.tokenizer, tokens)), self.opened)

    def generate(
        self, model: nn.Module, talks: Sequence[Sequence[dict]], samples: int, sampling: Sampling, seed: int = 0
    ) -> list[tuple[str, bool]]:
        """`samples` answers to each conversation, in order: the text, and whether it ended. Each worker generates its
        share, and every worker gets all answers. They depend on the seed alone, and affect no later draws."""
        was_training = model.training
        model.eval()
        width, turns = self.turns(samples)
        every = list(self.batches([talk for talk in talks for _ in range(turns)], width))
        mine = []
        last = len(every) + -len(every) % self.backend.world_size
        numbers = range(self.backend.rank, last, self.backend.world_size)
        with whole(model), own_randomness(self.backend):  # workers generate answers of different lengths
            for number in watched(numbers, "generating answers", len(numbers), shown=self.backend.is_main):
                self.backend.seed(seed_of(seed, number))
                mine.append(self._answers(model, *every[number % len(every)], width, sampling))
        model.train(was_training)
        shares = self.backend.group.gather(mine)
        answers = [tuple(one) for turn in range(len(mine)) for share in shares for one in share[turn]]
        answers = answers[: len(talks) * turns * width]
        return [answer for at, answer in enumerate(answers) if at % (turns * width) < samples]

    def _answers(
        self, model: nn.Module, asked: list, filled: list, samples: int, sampling: Sampling
    ) -> list[tuple[str, bool]]:
        """Answers to the first conversations of `filled`, as many as `asked` has."""
        prompts = Prompts(**self.backend.to_device(vars(self.encode(filled))))
        done = rollout(model, prompts, samples, self.length, sampling, self.ends, self.backend)
        found = self.backend.to_host([done.tokens, done.mask.sum(2), done.ended])
        return [
            (self.decode(ids[: count - end]), end)
            for _, *group in zip(asked, *(t.tolist() for t in found))
            for ids, count, end in zip(*group)
        ]

    def turns(self, samples: int) -> tuple[int, int]:
        """How many answers per conversation to generate at a time, and how often, to get at least `samples`."""
        width = min(samples, self.rows)
        return width, -(-samples // width)

    def batches(self, items: list, samples: int) -> Iterator[tuple[list, list]]:
        """Batches of items, sized so that `samples` answers per item make about `rows` answers, and for each batch the
        items to compute: on XLA these are repeated up to full size, so that there is one shape."""
        size = max(1, self.rows // samples)
        for start in range(0, len(items), size):
            batch = items[start : start + size]
            yield batch, (batch * size)[:size] if self.backend.static_shapes else batch


@contextmanager
def own_randomness(backend: TorchBackend) -> Iterator[None]:
    """Context whose draws do not influence later ones."""
    state = backend.rng_state()
    try:
        yield
    finally:
        backend.set_rng_state(state)
