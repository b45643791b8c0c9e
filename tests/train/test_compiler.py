"""torch's compiler comes when it is needed, and nothing is different then."""

from __future__ import annotations

import subprocess
import sys

import torch._dynamo

from tests.patience import PATIENCE_S
from zmqtrain.train.compiler import once_there, postpone

_BEGINNING = """
import sys
from zmqtrain.train.compiler import once_there, postpone
postpone()
import torch
from torch import nn
from zmqtrain.train.hooks import OwnHook

def there():
    return "torch._dynamo.eval_frame" in sys.modules

def steps(make):
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters())
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.tolist() for parameter in model.parameters()]
"""


def run(code: str) -> list[str]:
    """What the code prints in a process of its own, in words."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGINNING + code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_optimizers_do_without_it_and_what_is_marked_is_not_compiled_once_it_is_there() -> None:
    """Optimizers are the same with it. Marks from before it was there are its own now: for optimizers, and for our hooks."""
    code = """
makes = [
    lambda each: torch.optim.SGD(each, 0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop,
    torch.optim.Adagrad, torch.optim.LBFGS,
]
before = [steps(make) for make in makes]
called = []
def watch(*_):
    called.append(torch.compiler.is_compiling())
model = nn.Linear(3, 1)
model.register_forward_pre_hook(OwnHook(watch))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
once_there(lambda: print("once"))
print(there())

@torch.compile(backend="eager")
def train(batch):
    optimizer.zero_grad()
    return model(batch).sum()

train(torch.ones(2, 3)).backward()
train(torch.ones(2, 3)).backward()
print(there(), called)
print(hasattr(vars(torch.optim.Optimizer.zero_grad.__wrapped__)["__dynamo_disable"], "_torchdynamo_disable"))
from torch._dynamo import eval_frame
print(sys.modules["torch._dynamo"] is torch._dynamo, eval_frame is torch._dynamo.eval_frame)
print(before == [steps(make) for make in makes])
"""
    assert run(code) == ["False", "once", "True", "[False,", "False]", "True", "True", "True", "True"]


def test_nothing_is_postponed_that_is_there_already() -> None:
    """In this process, whether or not it had a stand-in for it until now."""
    assert torch._dynamo.eval_frame is not None
    there = sys.modules["torch._dynamo"]
    postpone()
    assert sys.modules["torch._dynamo"] is torch._dynamo is there
    called = []
    once_there(lambda: called.append(True))
    assert called == [True]
