"""Options stand before or after the topology file; what follows a script is the script's."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import typer

from zmqtrain.cli.command import Command, Commands, ScriptCommand, options_first


def example() -> typer.Typer:
    """Commands with every kind of parameter."""
    app = typer.Typer(cls=Commands)

    @app.command(cls=Command)
    def first(
        needed: str,
        left_out: Annotated[str, typer.Argument()] = "",
        several: Annotated[list[str] | None, typer.Argument(metavar="MORE")] = None,
        *,
        flag: bool = False,
        value: int = 3,
    ) -> None:
        """Do one thing.

        A paragraph that is
        two lines in the source: [job] steps.
        """

    @app.command(cls=ScriptCommand)
    def second(file: str) -> None: ...

    return app


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        example()([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_usage_names_arguments_and_brackets_what_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"first \[OPTIONS\] NEEDED \[LEFT_OUT\] \[MORE\]\.\.\.\s", shown("first", capsys=capsys))
    assert re.search(r"second \[OPTIONS\] FILE \[SCRIPT \[ARGUMENTS\]\.\.\.\]\s", shown("second", capsys=capsys))


def test_help_of_flags_asks_for_no_value_and_paragraphs_fill_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown("first", capsys=capsys)
    assert re.search(r"--value\s+<?int", said, re.IGNORECASE)
    assert "bool" not in said.lower()
    assert "A paragraph that is two lines in the source: [job] steps." in said
    assert "bool" not in shown(capsys=capsys).lower()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("job.toml", "job.toml"),
        ("job.toml --data d --json", "--data d --json job.toml"),
        ("--json job.toml --data d", "--json --data d job.toml"),
        ("job.toml --data=d script.py --data x -v", "--data=d job.toml script.py --data x -v"),
        ("job.toml script.py --json", "job.toml script.py --json"),
        ("job.toml --data", "--data job.toml"),
        ("job.toml -- --json", "job.toml -- --json"),
        ("job.toml --help", "--help job.toml"),
    ],
)
def test_options_first(given: str, expected: str) -> None:
    assert options_first(given.split(), {"--data", "--set"}) == expected.split()
