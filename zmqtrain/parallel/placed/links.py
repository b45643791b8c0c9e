"""Parameters and buffers that a model also keeps elsewhere: as attributes, or in lists and dictionaries of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: What modules have of torch.
_TORCHS = frozenset(vars(nn.Module())) | {"_flat_weights"}


@dataclass(frozen=True, slots=True)
class Link:
    """A place where a tensor is kept."""

    container: Any
    """A dictionary or a list."""
    key: Any
    tensor: Tensor

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Keep another tensor there, by the id of the one that is found."""
        if self.key in self.container if isinstance(self.container, dict) else self.key < len(self.container):
            found = self.container[self.key]
            if id(found) in others:
                self.container[self.key] = others[id(found)]


def links_of(model: nn.Module) -> list[Link]:
    """All places where modules of a model keep its parameters and buffers, but for those where torch has them."""
    own = {id(each) for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values())}
    found: list[Link] = []
    for module in model.modules():
        kept = vars(module)
        open_: list[Any] = []
        for name, value in kept.items():
            if name in _TORCHS:
                continue
            if isinstance(value, Tensor):
                if id(value) in own:
                    found.append(Link(kept, name, value))
            elif isinstance(value, list | dict):
                open_.append(value)
        seen: set[int] = set()
        while open_:
            container = open_.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            for key, value in _entries(container):
                if isinstance(value, Tensor):
                    if id(value) in own:
                        found.append(Link(container, key, value))
                elif isinstance(value, list | dict):
                    open_.append(value)
    return found


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)
