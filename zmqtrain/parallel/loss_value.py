"""What a task's loss must return."""

from __future__ import annotations

from torch import Tensor

from zmqtrain.errors import TaskError
from zmqtrain.words import typed


def no_loss(returned: object) -> TaskError:
    """The error for a loss that nothing can be trained with."""
    what = typed(returned)
    if isinstance(returned, Tensor):
        gradient = "" if returned.requires_grad else " that does not require a gradient"
        what = f"a tensor of shape {list(returned.shape)}{gradient}"
    return TaskError(
        f"Task.loss(output, target) returned {what}; it must return the mean loss as a tensor of one element that depends on the "
        "model's parameters, or the pair (sum, weight)"
    )
