"""``python -m tests.embed.loops`` prints the table as docs/sessions.md has it."""

from tests.embed.loops import table

print(table())
