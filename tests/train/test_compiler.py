"""torch's compiler comes when it is needed, and nothing is different then."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

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


def test_optimizers_do_without_it_and_are_the_same_with_it() -> None:
    code = """
makes = [
    lambda each: torch.optim.SGD(each, 0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop,
    torch.optim.Adagrad, torch.optim.LBFGS,
]
before = [steps(make) for make in makes]
print(there())
torch.compiler.reset()
print(there(), before == [steps(make) for make in makes])
"""
    assert run(code) == ["False", "True", "True"]


def test_what_is_marked_is_not_compiled_once_it_is_there() -> None:
    """Marks from before it was there are its own now: for optimizers, and for our hooks."""
    code = """
steps(lambda each: torch.optim.SGD(each, 0.1))
called = []
def watch(*_):
    called.append(torch.compiler.is_compiling())
model = nn.Linear(3, 1)
model.register_forward_pre_hook(OwnHook(watch))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
once_there(lambda: print("once"))
assert not there()

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
"""
    assert run(code) == ["once", "True", "[False,", "False]", "True", "True", "True"]


def test_nothing_is_postponed_that_is_there_already() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch._dynamo\n" + _BEGINNING + "print(there(), torch._dynamo.eval_frame is not None)"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
