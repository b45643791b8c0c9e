"""The description of the package on a package index: README.md as a text that stands alone, without relative links.

hatchling calls this when it builds a wheel or a source distribution (`tool.hatch.metadata.hooks.custom` in pyproject.toml). The one
place for the repository's address is ``Repository`` in ``[project.urls]``. With it, links and pictures lead to the files at the tag
of the release there. Without it there is nowhere to lead to: the text names the files of the source distribution instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
#: A link that is all there is in a pair of parentheses.
_ASIDE = re.compile(r"\(\[[^\]]*\]\((?P<target>[^)\s]+)\)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
#: Stands below the first paragraph if there is no address.
WITHOUT_ADDRESS = "Files that this text names are in the source distribution of the package."


def description(readme: str, address: str | None, version: str) -> str:
    """The README for a package index.

    Args:
        address: of the repository, such as ``https://github.com/OWNER/zmqtrain``; None if it has none.
        version: of the release, whose tag is ``v`` and the version.
    """
    parts = _FENCE.split(readme)
    for index in range(0, len(parts), 2):  # the others are blocks of code
        parts[index] = _named(parts[index]) if address is None else _led(parts[index], f"{address.rstrip('/')}/{{}}/v{version}/")
    if address is None:
        title, first, rest = "".join(parts).split("\n\n", 2)
        return "\n\n".join([title, first, WITHOUT_ADDRESS, rest])
    return "".join(parts)


def _led(text: str, folder: str) -> str:
    """The text with absolute links. ``folder``: where the files are, with a place for how they are shown."""

    def absolute(link: re.Match[str]) -> str:
        if _elsewhere(link["target"]):
            return link[0]
        return f"{link['picture']}[{link['text']}]({folder.format('raw' if link['picture'] else 'blob')}{link['target']})"

    return _LINK.sub(absolute, text)


def _named(text: str) -> str:
    """The text with the names of files in place of links to them."""

    def aside(link: re.Match[str]) -> str:
        return link[0] if _elsewhere(link["target"]) else f"(`{_file(link['target'])}`)"

    def name(link: re.Match[str]) -> str:
        if _elsewhere(link["target"]):
            return link[0]
        file = _file(link["target"])
        if link["picture"]:
            return f"*{link['text']} (picture: `{file}`)*"
        return f"`{file}`" if link["text"] == file else f"{link['text']} (`{file}`)"

    return _LINK.sub(name, _ASIDE.sub(aside, text))


def _elsewhere(target: str) -> bool:
    return "://" in target or target.startswith(("#", "mailto:"))


def _file(target: str) -> str:
    return target.partition("#")[0]


def get_metadata_hook() -> Any:
    """What hatchling looks for. Only this needs hatchling."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class Description(MetadataHookInterface):  # type: ignore[misc]
        def update(self, metadata: dict[str, Any]) -> None:
            readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
            text = description(readme, metadata.get("urls", {}).get("Repository"), metadata["version"])
            metadata["readme"] = {"content-type": "text/markdown", "text": text}

    return Description
