"""Adapts the pages of docs/, which are written for a repository, to the site (hooks of mkdocs; see mkdocs.yml).

* Links to files outside docs/ (``../launch/digits.toml``) lead to pages that show these files, and folders to lists of their files.
* The lists of GitHub's Markdown, indented by their marker's width, become those of Python's, which are indented by four.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Pages of the repository's root.
AT_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
#: Where these are on the site.
PROJECT = "project"
#: Where on the site the files of the repository are that pages link to.
REPOSITORY = "repository"

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"( *)([*-]|\d+\.) +(?=\S)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".service": "ini"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and one for each file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel  # not needed by what tests look at

    for name in AT_ROOT:
        files.append(File.generated(config, f"{PROJECT}/{name}", content=(ROOT / name).read_text()))
    todo = [file.src_uri for file in files.documentation_pages()]
    while todo:
        page = todo.pop()
        for target in outside(page, files.src_uris[page].content_string):
            uri = page_of(target)
            if uri not in files.src_uris:
                content = shown(target)
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
                todo.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn one page into what Python's Markdown understands, with links that lead to pages of the site."""
    uri = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = in_repository(uri, target)
        if path is None:
            return match[0]
        goal = page_of(path)
        return posixpath.relpath(goal, posixpath.dirname(uri) or ".") + anchor

    text = markdown if uri.startswith(f"{REPOSITORY}/") and not uri.endswith("index.md") else _LINK.sub(link, markdown)
    return "\n".join(reindented(text.splitlines()))


def outside(uri: str, markdown: str) -> Iterator[str]:
    """The files and folders outside docs/, as paths in the repository, to which a page links."""
    if uri.startswith(f"{REPOSITORY}/") and not uri.endswith("index.md"):
        return
    for match in _LINK.finditer(markdown):
        path = in_repository(uri, match[1])
        if path is not None and not is_page(path):
            yield path


def in_repository(uri: str, target: str) -> str | None:
    """The file that a page of the site links to, as a path in the repository; None if it is none of its files."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    folder = posixpath.dirname(uri)
    if folder.startswith(REPOSITORY):
        folder = folder.removeprefix(REPOSITORY).lstrip("/")
    else:
        folder = "" if folder == PROJECT else posixpath.join("docs", folder)
    path = posixpath.normpath(posixpath.join(folder, target))
    return path if (ROOT / path).exists() else None


def is_page(path: str) -> bool:
    """Whether this file of the repository is a page or a picture of the site as it is."""
    return path in AT_ROOT or (path.startswith("docs/") and path.endswith((".md", ".svg")))


def page_of(path: str) -> str:
    """The page of the site that shows a file or folder of the repository."""
    if is_page(path):
        return f"{PROJECT}/{path}" if path in AT_ROOT else path.removeprefix("docs/")
    return f"{REPOSITORY}/{path}/index.md" if (ROOT / path).is_dir() else f"{REPOSITORY}/{path}.md"


def shown(path: str) -> str:
    """The page of a file, or of a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(each.name for each in place.iterdir() if each.is_file() and not each.name.startswith("."))
        return "\n".join([f"# {path}", "", *(f"* [{name}]({name})" for name in names), ""])
    if place.suffix == ".md":
        return place.read_text()
    fence = "````"
    language = _LANGUAGES.get(place.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{place.read_text().rstrip()}\n{fence}\n"


def reindented(lines: list[str]) -> Iterator[str]:
    """Lists as Python's Markdown wants them: a blank line before, and everything in an item indented by four spaces a level."""
    levels: list[tuple[int, int]] = []  # of each open list: where its marker stands, and where its text begins
    fenced, before = "", ""
    for line in lines:
        indent = len(line) - len(line.lstrip(" "))
        fence = _FENCE.match(line)
        if not fenced and line.strip():
            item = _ITEM.match(line)
            blank = not before.strip()
            while levels and indent < levels[-1][1] and (blank or item) and not (item and indent == levels[-1][0]):
                levels.pop()
            if item:
                if not levels or indent >= levels[-1][1]:
                    if not levels and not blank:
                        yield ""
                    levels.append((indent, len(item[0])))
                else:
                    levels[-1] = (indent, len(item[0]))
                before = line
                yield "    " * (len(levels) - 1) + line[indent:]
                continue
        if fence:
            fenced = "" if fenced == fence[1] else fenced or fence[1]
        before = line
        text = levels[-1][1] if levels else 0
        yield ("    " * len(levels) + line[min(text, indent) :]) if levels and line.strip() else line
