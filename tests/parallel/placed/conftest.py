"""torchvision can be imported where its own operators cannot be loaded."""

from tests.torchvision_operators import define

define()
