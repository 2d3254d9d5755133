"""Our echo states equal ReservoirPy's on the same matrices: `make test-peers`."""

import numpy as np
import pytest
import torch

from qat_lora.experiments.stories.reservoir import EchoState, ReservoirSpec

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("leak", [1.0, 0.3])
def test_states_equal_reservoirpys(leak):
    from reservoirpy.nodes import Reservoir

    cell = EchoState(ReservoirSpec(60, "esn", radius=1.1, density=0.2, leak=(leak, leak)), 4).double()
    series = torch.randn(3, 200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    node = Reservoir(W=cell.w.numpy(), Win=cell.w_in.numpy(), bias=0.0, lr=leak)
    ours, _ = cell(series, cell.begin(3))
    assert np.abs(ours.numpy() - node.run(series.numpy())).max() < 1e-6
