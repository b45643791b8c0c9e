"""Settings that are for tasks only: the user's own training loop does these things itself, or cannot have them."""

from __future__ import annotations

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Topology


def check_script(topology: Topology, *, resume: str | None) -> None:
    """Raise `UsageError` for settings that would load, save or divide a script's model, or end or evaluate its training.
    ``resume``: a checkpoint to continue from."""
    job = topology.job
    asked = {"steps": job.steps, "until": job.until, "epochs": job.epochs != 1 and job.epochs, "eval_every": job.eval_every}
    if given := [name for name, value in asked.items() if value]:
        raise UsageError(f"[job] {given[0]} is for tasks: a script decides itself when its loop ends. Remove it")
    if topology.compute.grid == "auto":
        raise UsageError(
            '[compute] grid = "auto" is for tasks, whose model can be profiled before the run: write a grid, like '
            f'"2x{max(1, topology.compute.group_size // 2)}", and a plan for a script (zmqtrain plan finds them for a task)'
        )
    if topology.exchange.compression == "auto":
        raise UsageError(
            '[exchange] compression = "auto" is for tasks, whose model is known before the run: name a way, like "int8" (zmqtrain '
            "plan recommends one for a task)"
        )
    if resume is not None:
        raise UsageError(
            "--resume is for tasks: a script writes its own checkpoints, and resumes from them itself (with an argument of its own)"
        )
    if job.weights is not None:
        raise UsageError("[job] weights is for tasks: let the script load them into its model, before session.replicate()")
    default = type(job).model_fields["checkpoint_every"].default
    if job.checkpoint_every not in (0, default):
        raise UsageError("[job] checkpoint_every is for tasks: a script writes its own checkpoints. Remove it")
    if job.keep_checkpoints != type(job).model_fields["keep_checkpoints"].default:
        raise UsageError("[job] keep_checkpoints is for tasks: a script writes its own checkpoints, and removes them. Remove it")


def check_session(topology: Topology, groups: int, *, overlap: bool | None) -> None:
    """Raise `UsageError` for settings that a session's loop makes itself. ``overlap``: as in
    `zmqtrain.embed.session.Session.replicate`."""
    if topology.optimizer.scale_lr != "none":
        raise UsageError(
            "[optimizer] scale_lr is for tasks: your schedule may have read the learning rate already. Remove it, and multiply "
            "the learning rate by session.groups, or its square root, yourself"
        )
    if topology.optimizer.lr is not None or topology.optimizer.explicit_momentum is not None:
        raise UsageError("[optimizer] lr and a number as momentum are for tasks: set them where you make the optimizer")
    if topology.compute.precision != "float32" or topology.compute.accumulate > 1:
        raise UsageError(
            "[compute] precision and accumulate are for tasks: in your own loop use torch.autocast and session.accumulating()"
        )
    if topology.compute.channels_last:
        raise UsageError(
            "[compute] channels_last is for tasks: in your own loop use images.to(memory_format=torch.channels_last), and the same "
            "for the model"
        )
    if topology.elastic and topology.exchange.kind == "allreduce":
        raise UsageError("with all-reduce only the runs of tasks can be elastic: remove [job] elastic")
    if overlap is False and topology.exchange.kind == "allreduce" and topology.exchange.every_steps(groups) > 1:
        raise UsageError(
            "overlap=False with [exchange] every: between exchanges the gradient of all workers is not available. Remove every, "
            "and put all but the last backward() of a step within session.accumulating()"
        )
