"""Writes docs/reference/ from the code: ``make docs``. A test compares the files with what this says.

Commands come from typer, exit codes from the classes and constants that define them, the API's names from each ``__all__``, and the
kinds of events from the calls that record them; what an event means stands here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

import zmqtrain
from zmqtrain import errors
from zmqtrain.c10d import errors as c10d_errors
from zmqtrain.cli.main import app
from zmqtrain.membership.actions import TOLD_TO_END
from zmqtrain.observe.summary import Summary
from zmqtrain.run.preemption import INTERRUPTED, PREEMPTED
from zmqtrain.run.report import USER_CODE

REFERENCE = Path(__file__).parent / "reference"
PACKAGE = Path(zmqtrain.__file__).parent
GENERATED = "<!-- Written by docs/make_reference.py (make docs): change that, or the code that it reads. -->"

COMMANDS = f"""\
# Commands

{GENERATED}

`zmqtrain COMMAND --help` prints the same on a terminal. Commands with `--json` print JSON lines only, one object a line, for
programs. [Exit codes](exit-codes.md) mean the same for all of them.
"""

EXIT_CODES = f"""\
# Exit codes

{GENERATED}

The code says what may help. Commands, agents and roles use the same codes; the `exit_code` in `summary.json` and `error.json` is
the launcher's. [Troubleshooting](../troubleshooting.md#exit-codes) says what to do about each.
"""

API = f"""\
# Python API

{GENERATED}

The site (`make docs-site`) has signatures and whole docstrings here, which it reads from the source; in the repository this page
lists the names. What is not named here may change without notice. Sizes are in bytes and times in seconds, as their names say
(`chunk_bytes`, `timeout_s`). Tensors are `torch.Tensor`; docstrings state their shapes.
"""

EVENTS_HEAD = f"""\
# Kinds of events, and metrics

{GENERATED}

The events of a run stand in `events.jsonl`; [Events](../events.md) describes the file and its lines. Read the kinds that you know
and skip others: new ones come with new features.
"""

METRICS_HEAD = """\
A script's `session.report("KIND", ...)` records kinds of its own; a search ([tuning](../tuning.md)) records each of its decisions,
with the reason, each `trial begins`, and each `trial` with its outcome.

## Metrics: `summary.json`

The summary is a fold of the events, written when the run ends. Besides the keys below it has `name`, `status` (done, failed,
halted, interrupted, preempted), `exit_code`, `world` (real, emulated, simulated), `seconds` (of the whole run), `hosts`, `roles`,
`groups`, `group_size`, `grid`, `gradients`, `losses` (workers that were lost), `versions` and `encrypted`. A value that was never
measured is null, or its key is missing.
"""

TRACES = """\
## Traces: `trace.json`

Spans of compute, send, receive and wait on each process, in the Chrome trace format: open it in [Perfetto](https://ui.perfetto.dev).
`zmqtrain report` draws the most important parts ([how to read them](../troubleshooting.md#why-is-it-slow)).
"""

# Commands

#: What stands for an option's value.
WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def commands() -> str:
    """Every command with its arguments, options and defaults."""
    group: Any = typer.main.get_command(app)
    shown = {name: command for name, command in group.commands.items() if not command.hidden}
    callbacks = {each.name or each.callback.__name__: each.callback for each in app.registered_commands if each.callback}
    lines = [
        COMMANDS,
        "| command | |",
        "|---|---|",
        *(f"| [`zmqtrain {name}`](#zmqtrain-{name}) | {cell(first_line(each.help))} |" for name, each in shown.items()),
        "",
    ]
    for name, command in shown.items():
        lines += [
            f"## `zmqtrain {name}`",
            "",
            f"```\nzmqtrain {name} {' '.join(command.usage_words())}\n```",
            "",
            prose(command.help),
            "",
        ]
        types = get_type_hints(callbacks[name])
        rows = [row(parameter, types) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def bare(annotation: Any) -> type:
    """The type of one value: that of Annotated, of an optional one, or of a list's items."""
    inner = [each for each in get_args(annotation) if each is not NoneType]
    return bare(inner[0]) if inner else annotation


def row(parameter: Any, types: Mapping[str, Any]) -> str:
    """One argument or option. ``types``: of the command's parameters, by name."""
    default = parameter.default() if callable(parameter.default) else parameter.default
    given = "required" if parameter.required else "" if default in (None, False, [], ()) else f"`{default}`"
    if is_argument(parameter):
        return f"| `{(parameter.metavar or parameter.name.upper())}` | {given} | {cell(parameter.help)} |"
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    word = "" if parameter.is_flag else f" `{parameter.metavar or WORDS[bare(types[parameter.name])]}`"
    return f"| {names}{word} | {given} | {cell(parameter.help)} |"


def first_line(text: str | None) -> str:
    return prose(text).split("\n\n")[0]


def prose(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("\\[", "[")


def cell(text: str | None) -> str:
    return " ".join(prose(text).split()).replace("|", "\\|")


# Exit codes


def exit_codes() -> str:
    """Every exit code, from the errors and constants that define them."""
    rows: dict[int, list[str]] = {0: ["done"]}
    for error in public_errors():
        rows.setdefault(error.exit_code, []).append(f"`{error.__name__}`: {sentence(error)}")
    rows.setdefault(USER_CODE, []).append("any other exception of the task's own code, or of a library that it uses")
    rows.setdefault(INTERRUPTED, []).append("interrupted by Ctrl-C, `zmqtrain stop` or SIGTERM to the launcher")
    rows.setdefault(PREEMPTED, []).append("preempted (SIGUSR1): the run has stopped with a checkpoint, and may continue")
    rows.setdefault(TOLD_TO_END, []).append("a worker, server or agent was told to end by SIGTERM")
    lines = [
        EXIT_CODES,
        "| codes | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | not a code of zmqtrain's own: Python ended before it could say more |",
        "| 2 | the command or the topology file is to be corrected |",
        "| 3 | the task's own code is to be corrected |",
        "| 64 to 127 | other failures that another try will not cure |",
        "| 128 and above | failures that another try may cure: schedulers may restart the run |",
        "",
        "| code | when |",
        "|---|---|",
        *(f"| {code} | {'<br>'.join(cell(each) for each in rows[code])} |" for code in sorted(rows)),
        f"| 128 + n | a worker or server was killed by signal n: {128 + 9} for SIGKILL, which often means that memory was short |",
        "",
    ]
    return "\n".join(lines)


def public_errors() -> list[type[errors.ZmqTrainError]]:
    """The classes of errors that users can meet, parents first."""
    modules = (errors, c10d_errors)
    found = [
        each for module in modules for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
    ]
    return [each for each in found if issubclass(each, errors.ZmqTrainError)]


def sentence(thing: Any) -> str:
    """The first sentence of a docstring, as Markdown."""
    first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
    return marked(" ".join(first.split())).rstrip(".")


def marked(text: str) -> str:
    """Our docstrings' marks for code, as Markdown's."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


# API

#: The modules whose names are for users, with what each is for: the names of ``__all__``, or those that stand here.
MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "zmqtrain": ("Training, sessions, and runs inside programs of your own.", ()),
    "zmqtrain.testing": ("Helpers for tests of your own code ([how](../how-to/testing.md)).", ()),
    "zmqtrain.parallel": ("Models divided over a grid, in your own program ([how](../parallel.md#in-your-own-program)).", ()),
    "zmqtrain.c10d": ("The `zmq` backend of torch.distributed ([how](../torch-distributed.md)).", ()),
    "zmqtrain.integrations.lightning": ("Lightning ([how](../frameworks.md#lightning)).", ("ZmqStrategy",)),
    "zmqtrain.integrations.accelerate": ("Accelerate ([how](../frameworks.md#accelerate)).", ("init_process_group",)),
    "zmqtrain.integrations.transformers": (
        "The Trainer of transformers ([how](../frameworks.md#the-trainer-of-transformers)).",
        ("exchange",),
    ),
    "zmqtrain.integrations.torchft": ("torchft ([how](../frameworks.md#torchft)).", ("ProcessGroupZmq",)),
    "zmqtrain.launcher.engine": (
        "What an engine of your own provides ([how](../engines.md#an-engine-of-your-own)).",
        ("Engine", "Handle", "RemoteEngine", "EngineRun"),
    ),
    "zmqtrain.observe": ("What a run has recorded, for programs ([how](../events.md)).", ()),
    "zmqtrain.observe.sinks.base": (
        "What a sink of your own provides ([how](../observe.md#a-sink-of-your-own)).",
        ("Sink", "QuietSink", "RunFacts", "Figures"),
    ),
    "zmqtrain.errors": ("Every error that zmqtrain raises on purpose.", ()),
    "zmqtrain.c10d.errors": ("Those of the `zmq` backend, which are errors of torch.distributed, too.", ()),
}
#: Constants and the like, whose documentation is this.
PLAIN = {
    "zmqtrain.__version__": "The version of the package, a string.",
    "zmqtrain.c10d.BACKEND": 'The backend\'s name, `"zmq"`.',
    "zmqtrain.testing.faults": "One function for each kind of fault: see [`[[faults]]`](../topology.md#faults).",
}


def api() -> str:
    """The page of the API: names, and directives from which the site takes signatures and docstrings."""
    lines = [
        API,
    ]
    for module, (about, _) in MODULES.items():
        lines += [f"## {module}", "", about, "", "| name | |", "|---|---|"]
        lines += [f"| `{name}` | {described(module, name)} |" for name in names_of(module)]
        lines += [""]
        for name in names_of(module):
            home = home_of(module, name)
            if home is not None:
                lines += [f"::: {home}", ""]
    return "\n".join(lines)


def names_of(module: str) -> list[str]:
    """The public names of a module."""
    if MODULES[module][1]:
        return list(MODULES[module][1])
    loaded = import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    return [
        name for name, value in vars(loaded).items() if inspect.isclass(value) and value.__module__ == module and name[0] != "_"
    ]


def home_of(module: str, name: str) -> str | None:
    """Where a name is defined; None if this page has said so before, or has no more to say."""
    if f"{module}.{name}" in PLAIN:
        return None
    if module.startswith("zmqtrain.integrations"):  # not imported: the frameworks need not be installed
        return f"{module}.{name}"
    value = getattr(import_module(module), name)
    defined = f"{value.__module__}.{name}" if not inspect.ismodule(value) else value.__name__
    first = next(each for each in MODULES if name in names_of(each) and same(each, name, module))
    if first != module or (module == "zmqtrain" and defined.startswith("zmqtrain.errors")):
        return None
    return "zmqtrain.simulate.run.simulate" if name == "simulate" else defined


def same(one: str, name: str, other: str) -> bool:
    """Whether a name is the same thing in two modules."""
    if one == other:
        return True
    if one.startswith("zmqtrain.integrations") or other.startswith("zmqtrain.integrations") or name not in names_of(one):
        return False
    values = getattr(import_module(one), name), getattr(import_module(other), name)
    return values[0] is values[1] or name == "simulate"


def described(module: str, name: str) -> str:
    """The first sentence about a name."""
    if f"{module}.{name}" in PLAIN:
        return PLAIN[f"{module}.{name}"]
    if module.startswith("zmqtrain.integrations"):
        tree = ast.parse((PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text())
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
        return cell(marked(" ".join((ast.get_docstring(found) or "").split("\n\n")[0].split())))
    value = getattr(import_module(module), name)
    if name == "simulate":
        value = import_module("zmqtrain.simulate.run").simulate
    return cell(sentence(value))


# Events

#: Every kind of event: what it says, and its values. Seconds are of the world's clock; bytes are bytes.
EVENTS: Mapping[str, tuple[str, str]] = {
    "join": ("A process has joined", "`peer`, `host`, `address`, `reason`; `late` if the run was under way"),
    "running": ("All members have joined, and training begins", "`members`, `reason`"),
    "continued": ("Another launcher has taken over the run", "`epoch`"),
    "restart": (
        "The run begins again from the checkpoint of the event's step (none: from its beginning)",
        "`number` of the restart, `counts` (false if the attempt before had not begun to train), `reason`, `without` (hosts that "
        "are left out), `samples` that the checkpoint holds",
    ),
    "leave": ("A member has done its work and left", "`peer`, `reason`"),
    "exit": ("A process has ended", "`peer`, `host`, `exit_code` (negative: the signal), `reason`"),
    "no workers": ("All workers are lost, and one is started again: the run waits for it", "`wait_s`, `reason`"),
    "not elastic": ("A worker has said that the run cannot go on without any of them", "`peer`, `reason`"),
    "backup": (
        "A shard of a run with replicas is on a second server from now on, or on one only",
        "`shard`, `server` (which serves it), `backup` (null: none), `alone` (no server is left that could be one), `reason`",
    ),
    "moves": (
        "A shard is to be on other servers",
        "`shard`, `server` (which is to serve it), `backup` (null: none), `reason`",
    ),
    "copied": ("A server has given another one a copy of its shard", "`shard`, `to`, `seconds`, `bytes`"),
    "drain": ("A host is asked to leave", "`host`, `roles`"),
    "moved": ("A server has handed a shard over to another one", "`shard`, `server` (which serves it now), `before`, `reason`"),
    "took over": (
        "A server serves a shard whose server was lost or has handed it over",
        "`shard`, `updates` (of its pieces, so far), `reason`",
    ),
    "lost": ("A member is gone without having left", "`peer`, `host`, `reason`"),
    "failed": ("A member has failed, and the run with it", "`peer`, `reason`"),
    "halt": ("A member asks to stop the run", "`peer` and `reason`, which has the error"),
    "finishing": ("All workers have left; servers and agents end", "`reason`"),
    "ended": ("The run is over", "`status` (done, halted, failed), `reason`"),
    "untold": ("A member could not be told something", "`peer`, `what`, `reason`"),
    "note": ("A line that was shown to the user", "`text`"),
    "warning": ("A line that was shown to the user as a warning", "`text`"),
    "built": ("The model is made", "`seconds`"),
    "start": (
        "A worker is ready for its first step",
        "`steps`, `due` (the samples until the end, where workers divide those of lost ones; otherwise null), `restored`, "
        "`parameters`, `buckets`, `device`, `samples`, `steps_per_epoch`, `data` (what is promised of them)",
    ),
    "step": (
        "A worker has made a step",
        "`epoch`, `loss` (mean of its samples), `samples` (its own), `seconds`, `compute_s`, `exposed_s` (waited for the network), "
        "`data_s` (waited for the batch), `lr`, `staleness` and `staleness_max` (updates)",
    ),
    "schema": ("The first line of the file", "`version` of the lines that follow, `reason`"),
    "slow": (
        "A worker is slow, or no longer ([who is slow](../events.md#who-is-slow))",
        "`what` (device, loader, link), `factor`, `since` (a time), `since_step`, `over`, `reason`",
    ),
    "links": (
        "Every 2 s: how fast a role's large messages get through",
        "`sent`: for each peer the bytes that have arrived so far, and the seconds in which some were on their way",
    ),
    "sums": ("Many events in a second, of one kind", "see [the file](../events.md#many-events-in-a-second)"),
    "eval": ("An evaluation has ended", "`seconds`, and each metric"),
    "finish": (
        "A worker has trained its last step",
        "`steps`, `group_samples`, `replica_spread` (largest difference of parameters), `batches` (gossip and averaging, if others "
        "train what a lost group has left: those of all groups that count since the run began, or was resumed)",
    ),
    "stopped": ("A worker has stopped on request, before this step", "`kept`: whether a checkpoint of it is kept; `batches`"),
    "checkpoint": ("A worker has sent its part of a checkpoint", "`seconds`"),
    "checkpoint complete": ("All parts of a checkpoint are on disk", "`step`, `seconds`, `folder`"),
    "checkpoint late": ("Parts of a checkpoint are missing after a long time", "`step`, `reason`"),
    "checkpoint failed": ("A checkpoint will never be complete", "`step`, `reason`"),
    "part of a checkpoint failed": ("A worker could not send its part", "`reason`"),
    "model failed": ("The model could not be written", "`step`, `reason`"),
    "loss scale": ("The scale of the loss has changed (float16)", "`scale`, `passed_over`"),
    "parts": ("The batch is divided anew, or not", "`parts`, `before`, `changed`, `sample_s`, `reason`"),
    "samples": ("What became of the samples of the ring", "counts, by what happened to them"),
    "skipping": ("A resumed stream is read from its beginning", "`batches`, `reason`"),
    "spread": ("How far gossip's models are apart", "`distance` (relative), `partner`"),
    "counted": (
        "Elastic all-reduce: the sums of this step are of these members, and not over the usual number of samples",
        "`members`, `samples`",
    ),
    "left_out": (
        "Elastic gossip or averaging: in the exchange of this step somebody has got nothing of these members, which were lost",
        "`workers`",
    ),
    "view": ("From this step on these members train", "`version`, `members`, `reason`"),
    "momentum": (
        "A worker at the start: what momentum the run has. A server: what its parameters have shown",
        "see [tuning](../tuning.md#with-look_ahead--none); of a server `fitted`, `updates`, `rate` (by what the fitted learning "
        "rate is multiplied; null if it stays)",
    ),
    "load": (
        "A model server or FC server: what it has handled since its previous one, every two seconds while it has work",
        "`seconds`, `messages`, `bytes`, `busy` (share of the time), `waiting` (messages behind the one that it takes, mean), "
        "`waiting_most`",
    ),
    "server": (
        "A model server has ended",
        "`updates`, `pushes`, `staleness` (a histogram), `staleness_mean`, `staleness_max`, `momentum`, `momentum_updates`, "
        "`shards` (those that it served in the end), `batches` and `batches_most` (the fewest and the most that count in a piece)",
    ),
    "fc": ("An FC server has ended", "`updates`, `samples`, `busy` (share of its time), `staleness_mean`, `staleness_max`"),
    "refused": ("A server has refused a request", "`sender`, `reason`"),
    "too late": ("A worker came when the others had trained all there was, and leaves", "`reason`"),
    "left whole": ("A layer of a divided model is not divided", "`layer`, `reason`"),
    "made whole": ("A worker has made the whole model at first", "`reason`"),
    "verified": (
        "A divided model was compared with the ordinary one",
        "`samples`, `precision`, `images` (the size of what was compared of each; empty: all of it), `seconds`",
    ),
    "not verified": ("It was not", "`reason`"),
    "traffic": (
        "A process has closed its endpoint",
        "`bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`, `resent_bytes`, `refused`, `intruders`, ..., and "
        "`sent` and `received`: bytes by peer",
    ),
}
#: Keys of summary.json that follow from events.
SUMMARY: Mapping[str, str] = {
    "steps": "steps of the furthest worker",
    "resumed_at": "the step of the checkpoint with which this run began; null if it began anew",
    "samples": "samples trained on in this run, by all workers together",
    "training_seconds": "from the beginning of the first step to the end of the last, in seconds",
    "samples_per_s": "samples divided by these seconds",
    "step_s": "seconds of a step: `median` and `p90` over all workers' steps",
    "exposed_communication_s": "seconds for which a step waited for the network: `median`, `p90`",
    "data": "what the run promises of its samples ([data](../data.md#what-a-run-promises))",
    "data_wait_s": "seconds for which a step waited for its batch: `median`, `p90`",
    "loss": "mean of the workers' newest losses",
    "eval": "the newest value of each metric",
    "staleness": "updates between a worker's read and its write: `mean`, `max`, `histogram`",
    "fc": "of the FC server: `updates`, `busy` (share of its time), `staleness`",
    "checkpoints": "`complete` (how many), `newest` (its step), `failed` (steps and reasons)",
    "momentum": "stated and measured momentum ([tuning](../tuning.md#with-look_ahead--none)); null without model servers",
    "bytes_sent": "bytes sent by all processes together",
    "slow": "workers that were found slow: `peer`, `what`, `factor`, `since_step`, `until_step` (`null`: to the end)",
    "resizing": "if anybody was lost, has left or has come: `lost` (how many, by kind of role), `drained` (hosts that were asked "
    "to leave), `came` (workers and servers), `moved` (shards), `went_on_s` (`median`, `max`: seconds from when a loss was known "
    "until workers had agreed on who goes on, or another server served the shard)",
    "replica_spread": "largest difference of a parameter between replicas at the end",
}
#: Where a kind is no literal in a call: values that pass through.
_CALLS = {"event", "Note", "_note", "_on_event", "record"}


def events() -> str:
    """The kinds of events, and the keys of the summary."""
    lines = [
        EVENTS_HEAD,
        "## Kinds",
        "",
        "| kind | it means | values |",
        "|---|---|---|",
        *(f"| `{kind}` | {meaning} | {values} |" for kind, (meaning, values) in EVENTS.items()),
        "",
        METRICS_HEAD,
        "| key | meaning |",
        "|---|---|",
        *(f"| `{key}` | {meaning} |" for key, meaning in SUMMARY.items()),
        "",
        TRACES,
    ]
    return "\n".join(lines)


def kinds() -> set[str]:
    """The kinds of events that the package records, as far as they are literals."""
    return {kind for path in sorted(PACKAGE.rglob("*.py")) for kind in kinds_in(ast.parse(path.read_text()))}


def kinds_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        first = node.args[0]
        if name in _CALLS and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def summary_keys() -> set[str]:
    """The keys of the summary that follow from events; some are there only if there is something to say."""
    return {*Summary().to_dict(), "data", "data_wait_s", "fc", "resizing"}


PAGES = {"commands.md": commands, "exit-codes.md": exit_codes, "api.md": api, "events.md": events}

if __name__ == "__main__":
    for page, document in PAGES.items():
        (REFERENCE / page).write_text(document())
