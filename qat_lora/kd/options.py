"""The options of an anchor. Methods import what they need, so that --help does not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qat_lora.errors import UserError
from qat_lora.run import options as opt
from qat_lora.run.options import RunConfig

if TYPE_CHECKING:
    from qat_lora.kd.anchor import Anchor


@dataclass(frozen=True, kw_only=True)
class AnchorOptions(RunConfig):
    """A KL to the original model's cached predictions on general text, against forgetting."""

    anchor_cache: str | None = opt.training(
        None,
        "KD cache of general text (folder or URL): also stay close to its teacher's predictions",
        identity="anchor",
    )
    anchor_weight: float = opt.training(0.1, "weight of the KL to --anchor-cache", **opt.WEIGHT)

    def anchor(self, model: str, tokenizer, rows: int) -> Anchor | None:
        """The anchor of a model, whose tokenizer has to be that of the cache. rows: the rows of a micro-batch on all
        workers."""
        from qat_lora.kd.anchor import Anchor
        from qat_lora.kd.dataset import open_split

        if not self.anchor_cache:
            return None
        found = open_split(self.anchor_cache, "train", model, tokenizer)
        if len(found) < rows:
            raise UserError(
                f"--anchor-cache {self.anchor_cache} has {len(found)} rows, fewer than a batch of {rows}; build a "
                "larger one, or lower --batch-size"
            )
        return Anchor(found, self.anchor_weight)

    def planned_anchor(self, rows: int) -> Anchor | None:
        """An anchor with the shapes of the cache, see kd.dataset.planned_rows."""
        from qat_lora.kd.anchor import Anchor
        from qat_lora.kd.dataset import planned_rows

        return Anchor(planned_rows(self.anchor_cache, rows), self.anchor_weight) if self.anchor_cache else None

    def anchor_length(self) -> int:
        """Tokens in a row of the anchor's cache."""
        from qat_lora.kd.dataset import planned_rows

        return len(planned_rows(self.anchor_cache, 1)[0]["tokens"]) if self.anchor_cache else 0
