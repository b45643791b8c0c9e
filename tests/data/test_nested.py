"""Structures keep what they are, and are divided by samples."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from zmqtrain.data.nested import mapped, rows
from zmqtrain.errors import TaskError


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers' models: its entries are attributes, too, and it has no update()."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *arguments: Any, **items: Any) -> None:
        raise TypeError("this class has no update()")


def output_of(**items: Any) -> Output:
    output = Output()
    for key, value in items.items():
        output[key] = value
    return output


def test_a_mapping_whose_entries_are_attributes_keeps_them() -> None:
    output = output_of(logits=torch.arange(4))
    assert mapped(output, lambda tensor: tensor * 2).logits.tolist() == [0, 2, 4, 6]
    assert rows(output, slice(1, 3), 4).logits.tolist() == [1, 2]
    assert output.logits.tolist() == [0, 1, 2, 3]


def test_what_is_not_known_to_be_divided_stays_whole_if_that_is_asked_for() -> None:
    cache, statistics = object(), torch.ones(3)
    part = rows({"logits": torch.arange(4), "cache": cache, "statistics": statistics}, slice(0, 2), 4, lenient=True)
    assert part["logits"].tolist() == [0, 1]
    assert part["cache"] is cache
    assert part["statistics"] is statistics
    with pytest.raises(TaskError, match="it is not known which part"):
        rows({"logits": torch.arange(4), "cache": cache}, slice(0, 2), 4)
