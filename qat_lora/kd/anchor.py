"""An anchor against forgetting: a KL to the cached predictions of the original model on general text."""

from itertools import islice

from torch import nn
from torch.utils.data import Dataset

from qat_lora.kd.training import kd_loss, target_entropy
from qat_lora.run.metrics import Share
from qat_lora.train.loop import Stage, Update, row_stream


class Anchor:
    """Adds weight · KL(teacher ‖ model) to the loss of each update, over as many rows of a KD cache as the update has
    of its own. rows: a KDCacheDataset, or another dataset of such items."""

    def __init__(self, rows: Dataset, weight: float):
        self.rows, self.weight = rows, weight
        self.stage: Stage | None = None

    def add_to(self, update: Update, model: nn.Module) -> None:
        """Add the anchor's gradients and the metric anchor_kl to an update. Call it in every update: the rows follow
        from the update's number, which is how a resumed stage finds the right ones."""
        stage, backend = update.stage, update.stage.backend
        if stage is not self.stage:
            self.stage, self.batches = stage, row_stream(self.rows, stage.plan, backend)(update.number - 1)
        for batch in islice(self.batches, stage.plan.accumulation):
            with backend.autocast():
                kl = kd_loss(model, batch) - target_entropy(batch)
            backend.backward(self.weight * kl)
            update.add(anchor_kl=Share(kl))
            if stage.plan.accumulation > 1:
                backend.step_boundary()
