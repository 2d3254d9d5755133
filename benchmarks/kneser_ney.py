"""An interpolated Kneser–Ney n-gram model with three discounts per order (Chen and Goodman 1998), as a baseline."""

import math
from collections import Counter, defaultdict


class KneserNey:
    """An n-gram model of one token stream. Lower orders count in how many contexts an n-gram occurs, not how often.
    Unigrams are interpolated with the uniform distribution over the vocabulary."""

    def __init__(self, tokens: list[int], order: int, vocab: int):
        self.order, self.vocab = order, vocab
        counts = Counter(zip(*(tokens[at:] for at in range(order))))
        self.levels = [_Level(counts)]
        for _ in range(order - 1):
            counts = Counter(gram[1:] for gram in counts)  # each longer n-gram counts once
            self.levels.insert(0, _Level(counts))

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        """P(token | context); only the last order − 1 tokens of the context count."""
        result = 1 / self.vocab
        for size, level in enumerate(self.levels):
            if size > len(context):
                break
            result = level.interpolate(context[len(context) - size :], token, result)
        return result

    def nll(self, tokens: list[int]) -> float:
        """Sum of −log P over a stream, in nats; each token is predicted from those before it."""
        return -sum(
            math.log(self.probability(token, tuple(tokens[max(0, at - self.order + 1) : at])))
            for at, token in enumerate(tokens)
        )


class _Level:
    """N-grams of one length: counts, discounts and, for each context, the sum of its counts and the number of tokens
    that follow it 1, 2 and 3+ times."""

    def __init__(self, counts: Counter):
        self.counts = counts
        have = Counter(min(count, 4) for count in counts.values())
        n1, n2, n3, n4 = (max(1, have[k]) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        # with few n-grams an estimate may lie outside (0, count); then the discount is 0.5
        self.discounts = (0.0, *(d if 0 < d < count else 0.5 for count, d in enumerate(estimates, 1)))
        self.sums, self.kinds = defaultdict(int), defaultdict(lambda: [0, 0, 0, 0])
        for gram, count in counts.items():
            self.sums[gram[:-1]] += count
            self.kinds[gram[:-1]][min(count, 3)] += 1

    def interpolate(self, context: tuple[int, ...], token: int, lower: float) -> float:
        total = self.sums.get(context, 0)
        if not total:
            return lower
        count = self.counts.get((*context, token), 0)
        left = sum(discount * kinds for discount, kinds in zip(self.discounts, self.kinds[context]))
        return (max(0.0, count - self.discounts[min(count, 3)]) + left * lower) / total
