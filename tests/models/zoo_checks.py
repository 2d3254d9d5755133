"""Run by test_zoo_xla.py in a process of its own: logits of tiny models on XLA's CPU device. Prints a JSON
line for each: the largest differences from the model's own on the CPU, relative to its largest logit.

PJRT_DEVICE=CPU python tests/models/zoo_checks.py NAME …
"""

import json
import sys

import torch
import zoo

from qat_lora.backend import open_backend
from qat_lora.errors import UserError
from qat_lora.models.architecture import hidden_states, packs
from qat_lora.models.attention import Layout
from qat_lora.models.check import check
from qat_lora.quant.student import head_of

LENGTH = 24
XLA = open_backend("xla", "fp32")


@torch.no_grad()
def gaps(name: str) -> dict:
    made = zoo.model(name)
    check(made)
    tokens = torch.randint(1, zoo.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    own = made(input_ids=tokens, use_cache=False).logits
    positions = torch.arange(LENGTH).repeat(1, 2)
    batch = XLA.to_device(
        {
            "rows": tokens,
            "packed": tokens.view(1, -1),
            "positions": positions,
            "segments": torch.arange(2 * LENGTH).view(1, -1) // LENGTH,
        }
    )
    XLA.place(made)

    def gap(rows: torch.Tensor, layout: Layout | None) -> float:
        ours = head_of(made).logits(hidden_states(made, rows, layout))
        XLA.step_boundary()
        return ((ours.cpu().view(own.shape) - own).abs().max() / own.abs().max()).item()

    found = {"rows": gap(batch["rows"], None)}
    if packs(made):
        found["packed"] = gap(batch["packed"], Layout.packed(batch["segments"], batch["positions"], False))
    return found | {"fallbacks": XLA.counters()["fallbacks"]}


def main(names: list[str]) -> None:
    for name in names:
        try:
            found = gaps(name)
        except UserError as error:
            found = {"refused": str(error)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name} | found), flush=True)


main(sys.argv[1:])
