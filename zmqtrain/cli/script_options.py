"""Whose option is it? Up to a script's name the command's, from there on the script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


class LaunchCommand(TyperCommand):
    """``launch [OPTIONS] FILE [OPTIONS] [SCRIPT ARGS...]``; click itself knows options before the first argument, or everywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Neither imported nor asked for by type: typer brings a click of its own since some release.
        options = [option for option in self.params if option.param_type_name == "option"]
        with_value = {name for option in options if not getattr(option, "is_flag", False) for name in option.opts}
        return super().parse_args(ctx, options_first(args, with_value))


def options_first(args: Sequence[str], with_value: set[str]) -> list[str]:
    """The same arguments, with the options that follow the first argument put before it. ``with_value``: options that take one."""
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
