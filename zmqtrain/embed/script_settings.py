"""What a topology file may ask of tasks only: a training loop that is not ours does it itself, or cannot have it."""

from __future__ import annotations

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Topology


def check_script(topology: Topology, *, resume: str | None) -> None:
    """Raise `UsageError` for what would begin, keep or divide a script's model. ``resume``: a checkpoint to go on from."""
    job = topology.job
    if topology.compute.grid == "auto" or topology.divided:
        raise UsageError("a script builds its model itself, so [compute] grid cannot divide it: name a task, or leave grid out")
    if resume is not None:
        raise UsageError(
            "--resume is for tasks: a script keeps its own checkpoints, and goes on from them itself (by an argument of its own)"
        )
    if job.weights is not None:
        raise UsageError("[job] weights is for tasks: let the script load them into its model, before session.replicate()")
    default = type(job).model_fields["checkpoint_every"].default
    if job.checkpoint_every not in (0, default):
        raise UsageError(
            "[job] checkpoint_every is for tasks: a script keeps its own checkpoints, at steps of its choice. Leave it out"
        )


def check_length(topology: Topology) -> None:
    """Raise `UsageError` for how long a file that is launched with a script asks to train, and when to evaluate."""
    job = topology.job
    asked = {"steps": job.steps, "until": job.until, "epochs": job.epochs != 1 and job.epochs, "eval_every": job.eval_every}
    if given := [name for name, value in asked.items() if value]:
        raise UsageError(f"[job] {given[0]} is for tasks: a script has a loop of its own, which nothing else ends. Leave it out")


def check_session(topology: Topology, groups: int, *, overlap: bool | None) -> None:
    """Raise `UsageError` for what a session's loop says itself. ``overlap``: as `zmqtrain.embed.session.Session.replicate`."""
    if topology.optimizer.scale_lr != "none":
        raise UsageError(
            "[optimizer] scale_lr is for tasks: a schedule of yours may have read the learning rate already. Leave it out, and "
            "multiply the learning rate by session.groups, or its square root, yourself"
        )
    if topology.optimizer.lr is not None or topology.optimizer.explicit_momentum is not None:
        raise UsageError("[optimizer] lr and a number as momentum are for tasks: set them where you make the optimizer")
    if topology.compute.precision != "float32" or topology.compute.accumulate > 1:
        raise UsageError(
            "[compute] precision and accumulate are for tasks: in a loop of yours use torch.autocast, session.accumulating()"
        )
    if overlap is False and topology.exchange.kind == "allreduce" and topology.exchange.every_steps(groups) > 1:
        raise UsageError(
            "overlap=False with [exchange] every: between exchanges there is no gradient of all workers to be had. "
            "Leave every out, and put all but the last backward() of a step within session.accumulating()"
        )
