"""What is imported once for all roles that a process forks: as much as all of them need, and torch's compiler (a second of
processor time, and 70 MB) only where a script may use it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: The functions that children call: of a run whose workers run any script, a script that does without the compiler, or a task.
SCRIPT_ENTRY = "zmqtrain.launcher.script_child:main"
SESSION_ENTRY = "zmqtrain.launcher.session_child:main"
TASK_ENTRY = "zmqtrain.launcher.task_child:main"
#: What a script may import that does not import the compiler; of anything else nobody knows.
_PLAIN = sys.stdlib_module_names | {"numpy", "torch", "zmqtrain"}
#: In a script that uses it, or parts of torch that do.
_WORDS = ("compile", "dynamo", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "onnx", "torch.export")


def entry_for(script: str | None) -> str:
    """The entry for roles of a run whose workers run this script, or a task."""
    if script is None:
        return TASK_ENTRY
    return SCRIPT_ENTRY if may_compile(Path(script)) else SESSION_ENTRY


def may_compile(script: Path) -> bool:
    """Whether a script may use torch's compiler, as far as it and the files beside it show without being run. A wrong answer costs
    time, and changes nothing: each worker imports it where it is needed (`zmqtrain.train.compiler`)."""
    seen, left = set[Path](), [script]
    while left:
        file = left.pop()
        seen.add(file)
        try:
            source = file.read_bytes()
            names = set(_imported(ast.parse(source)))
        except (OSError, ValueError, SyntaxError):
            return True
        if any(word.encode() in source for word in _WORDS):
            return True
        left += {script.with_name(f"{name}.py") for name in names - _PLAIN} - seen  # of an installed package there is no such file
    return False


def _imported(tree: ast.Module) -> Iterator[str]:
    """The first part of each name that is imported anywhere; empty for a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else str(node.module).partition(".")[0]
