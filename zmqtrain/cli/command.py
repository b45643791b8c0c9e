"""How commands show their help, and how ``launch`` tells its options from the script's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

# click's classes are neither imported nor tested by type: typer brings its own click.


def _shown(parameters: list[Any]) -> list[Any]:
    """The same parameters; what takes no value has no type in the help, where it would seem to want one."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Commands(TyperGroup):
    """All commands: the command without an argument."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _shown(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Hidden commands can be called, and are not suggested."""
        everything = self.commands
        self.commands = {name: command for name, command in everything.items() if not command.hidden or name in args[:1]}
        try:
            return super().resolve_command(ctx, args)
        finally:
            self.commands = everything


class Command(TyperCommand):
    """One command. Its help is the docstring, whose paragraphs fill the terminal's width."""

    #: What the usage line names after the arguments.
    more: tuple[str, ...] = ()

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = escape("\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in paragraphs))  # [job] is no markup

    def get_params(self, ctx: Any) -> list[Any]:
        return _shown(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return self.usage_words()

    def usage_words(self) -> list[str]:
        """``[OPTIONS]`` and the arguments, those that may be left out in brackets."""
        arguments = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        words = [(each.metavar or str(each.name).upper(), each) for each in arguments]
        shown = [word if each.required else f"[{word}]" for word, each in words]
        repeated = [word + ("" if each.nargs == 1 else "...") for word, (_, each) in zip(shown, words, strict=True)]
        return ["[OPTIONS]", *repeated, *self.more]


class ScriptCommand(Command):
    """``launch [OPTIONS] FILE [OPTIONS] [SCRIPT ARGS...]``: options before the script's name are the command's, the rest are the
    script's. click itself allows options before the first argument only, or everywhere."""

    more = ("[SCRIPT [ARGUMENTS]...]",)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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
