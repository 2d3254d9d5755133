"""How a training figure is combined over workers, then over steps, into one number in a line of metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Value = Tensor | float | int
SUM, COUNT = ".sum", ".count"  # the two numbers of a `Ratio`, as checkpoints keep them


@dataclass(frozen=True)
class Metric:
    """A figure that is the same in all workers (worker 0's is used); a line shows the mean over the steps that have
    it."""

    value: Value
    summed = False  # over the workers

    def __add__(self, other: "Metric") -> "Metric":
        """Combine the figures of two micro-batches of an update."""
        return type(self)(self.value + other.value)

    def detached(self) -> "Metric":
        """The same figure, detached from the autograd graph."""
        return type(self)(self.value.detach()) if isinstance(self.value, Tensor) else self

    @staticmethod
    def shown(values: Sequence[float]) -> float:
        """The number in a line, from the values of the steps that have the figure."""
        return sum(values) / len(values)


@dataclass(frozen=True)
class Share(Metric):
    """This worker's share of a figure of the whole update, such as its part of the loss. Shares are summed over
    workers; a line shows the mean over steps."""

    summed = True


@dataclass(frozen=True)
class Total(Metric):
    """A count, such as tokens, summed over workers and steps."""

    summed = True
    shown = staticmethod(sum)


@dataclass(frozen=True)
class Last(Metric):
    """A setting that is the same in all workers, such as the learning rate; a line shows its value in the last
    step."""

    @staticmethod
    def shown(values: Sequence[float]) -> float:
        return values[-1]


@dataclass(frozen=True)
class Ratio:
    """(sum, count) of this worker. Both are summed over workers and steps, and a line shows sum / count; nothing if the
    count is 0."""

    total: Value
    count: Value

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.total + other.total, self.count + other.count)

    def detached(self) -> "Ratio":
        return self


def parts_of(metrics: dict[str, Metric | Ratio | Value]) -> dict[str, Metric]:
    """The metrics of a step by the names under which they are stored. A plain number becomes a `Metric`."""
    parts: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Ratio):
            parts |= {name + SUM: Total(metric.total), name + COUNT: Total(metric.count)}
        else:
            parts[name] = metric if isinstance(metric, Metric) else Metric(metric)
    return parts


def line_of(steps: Sequence[dict[str, float]], kinds: dict[str, type[Metric]]) -> dict[str, float]:
    """The figures of a line, from those of its steps, which are already summed over workers."""
    figures = {}
    for name in dict.fromkeys(name for values in steps for name in values):
        kind = Total if name.endswith((SUM, COUNT)) else kinds.get(name, Metric)
        figures[name] = kind.shown([values[name] for values in steps if name in values])
    for name in [name for name in figures if name.endswith(SUM)]:
        own = name.removesuffix(SUM)
        total, count = figures.pop(name), figures.pop(own + COUNT)
        figures |= {own: total / count} if count else {}
    return figures
