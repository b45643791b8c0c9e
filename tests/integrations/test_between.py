"""What training loops of frameworks must not do beside an exchange, as it would have no effect."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.errors import UsageError
from zmqtrain.integrations.between import require_fit, require_kind

ONE = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_kinds_have_the_names_of_topology_files() -> None:
    for kind in ("gossip", "model_server", "averaging"):
        require_kind(kind)
    with pytest.raises(UsageError, match="'model_servers'; it must be one of gossip, model_server, averaging"):
        require_kind("model_servers")


def test_model_servers_take_gradients_as_they_leave_backward() -> None:
    require_fit("model_server", [ONE])
    with pytest.raises(UsageError, match="before they are clipped: leave out gradient_clip_val"):
        require_fit("model_server", [ONE], clips="gradient_clip_val")
    with pytest.raises(UsageError, match="unscaled"):
        require_fit("model_server", [ONE], scales=True)
    with pytest.raises(UsageError, match="one optimizer, but there are 2"):
        require_fit("model_server", [ONE, ONE])
    require_fit("gossip", [ONE, ONE], clips="gradient_clip_val", scales=True)
