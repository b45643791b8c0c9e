"""Tell the command's options from the script's: those before the script's name are the command's, the rest are the script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


class LaunchCommand(TyperCommand):
    """``launch [OPTIONS] FILE [OPTIONS] [SCRIPT ARGS...]``; click itself allows options before the first argument only, or
    everywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Neither imported nor tested by type: recent releases of typer bring their own click.
        options = [option for option in self.params if option.param_type_name == "option"]
        with_value = {name for option in options if not getattr(option, "is_flag", False) for name in option.opts}
        return super().parse_args(ctx, options_first(args, with_value))


def options_first(args: Sequence[str], with_value: set[str]) -> list[str]:
    """The same arguments, with the options after the first argument moved before it. ``with_value``: the options that take a
    value."""
    options: list[str] = []
    rest = list(args)
    file: list[str] = []
    while rest:
        if rest[0] in with_value:
            options += rest[:2]
            del rest[:2]
        elif rest[0].startswith("-") and rest[0] not in ("-", "--"):
            options.append(rest.pop(0))
        elif not file and rest[0] != "--":
            file.append(rest.pop(0))
        else:
            break
    return [*options, *file, *rest]
