"""The documentation is what the code says, names everything that it should name, and its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from zmqtrain import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_the_topology_reference_is_up_to_date() -> None:
    document = runpy.run_path(str(DOCS / "make_topology.py"))["document"]()
    assert (DOCS / "topology.md").read_text() == document, "run `make docs`"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "make_reference.py"))


@pytest.mark.parametrize("page", ["commands.md", "exit-codes.md", "api.md", "events.md"])
def test_the_reference_is_up_to_date(reference: dict[str, Any], page: str) -> None:
    assert (DOCS / "reference" / page).read_text() == reference["PAGES"][page](), "run `make docs`"


def test_every_kind_of_event_and_every_metric_has_a_meaning(reference: dict[str, Any]) -> None:
    assert reference["kinds"]() <= reference["EVENTS"].keys(), "say in docs/make_reference.py what the new kind means"
    assert reference["summary_keys"]() == reference["SUMMARY"].keys()


def every_error(root: type[errors.ZmqTrainError]) -> set[type[errors.ZmqTrainError]]:
    """All errors of the package, also those of single modules: a failed run shows their names, too."""
    for path in sorted((ROOT / "zmqtrain").rglob("*.py")):
        if re.search(r"^class \w+\(.*(Error|Comparable)\b.*\):", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found, new = {root}, [root]
    while new:
        found.update(new := [each for error in new for each in error.__subclasses__() if each.__module__.startswith("zmqtrain.")])
    return found


def test_every_error_and_exit_code_is_in_troubleshooting(reference: dict[str, Any]) -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    public = [error for error in reference["public_errors"]() if error.__name__ != "ZmqTrainError"]
    assert len(public) > 20
    for error in public:
        assert re.search(rf"^\|.*`{error.__name__}`.*\|", text, re.MULTILINE), error.__name__
    named = set(re.findall(r"`(\w+)`", text))
    assert not {error.__name__ for error in every_error(errors.ZmqTrainError)} - named - {"ZmqTrainError"}
    codes = re.findall(r"^\| (\d+) \|", reference["exit_codes"](), re.MULTILINE)
    for code in codes:
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), code


def test_every_page_has_one_place_on_the_site() -> None:
    named = re.findall(r"(?:: |- )([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == {page for page in named if not page.startswith("project/")}


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras:
        assert f"`zmqtrain[{extra}]`" in (DOCS / "index.md").read_text()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        goal = page if not target else page.parent / target
        assert goal.exists(), f"{page.name} links to {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_are_there(page: Path) -> None:
    files = [
        str(file.relative_to(ROOT))
        for folder in ("zmqtrain", "docs", "tests", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in set(re.findall(r"`([a-z_\w]+(?:/\w+)*/\w+\.py)`", text)):
        assert any(f"/{file}".endswith(f"/{name}") for file in files) or (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_layers_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " > ".join(layer.replace(" | ", ", ") for layer in contracts[0]["layers"])
    assert layers in " ".join((DOCS / "architecture.md").read_text().replace("`", "").split())


def test_the_image_that_kubernetes_runs_is_the_dockerfiles() -> None:
    name = re.search(r"docker build -t (\S+) \.", (ROOT / "Dockerfile").read_text())
    assert name is not None
    assert f'image = "{name[1]}"' in (ROOT / "launch" / "kubernetes.toml").read_text()
    manifests = list(yaml.safe_load_all((ROOT / "launch" / "jobset.yaml").read_text()))
    assert f"'image': '{name[1]}'" in str(manifests)


def test_the_images_build_finds_what_it_copies_and_starts_the_agent() -> None:
    words = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    sources = [source for first, *rest in words if first == "COPY" and not rest[0].startswith("--") for source in rest[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == sent
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"README.md", "hatch_build.py", "pyproject.toml", "LICENSE"} <= sent, "what the wheel is built from"
    assert ["ENTRYPOINT", '["zmqtrain"]'] in words
    assert ["CMD", '["agent"]'] in words
    names = re.findall(r"\bzmqtrain:(\d[\w.]*\w) ", (ROOT / "Dockerfile").read_text() + (DOCS / "clusters.md").read_text())
    assert set(names) == {project["version"]}


@pytest.fixture(scope="module")
def description() -> Callable[[str, str | None, str], str]:
    """What package indexes show of a README."""
    made: Callable[[str, str | None, str], str] = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    return made


def test_a_package_index_shows_links_to_the_files_of_the_release(description: Callable[[str, str | None, str], str]) -> None:
    shown = description((ROOT / "README.md").read_text(), "https://git.example/o/zmqtrain/", "1.2.3")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", shown, flags=re.DOTALL))
    assert len(links) > 20
    for picture, target in links:
        way = f"https://git.example/o/zmqtrain/{'raw' if picture else 'blob'}/v1.2.3/"
        assert target.startswith(way)
        assert (ROOT / target.removeprefix(way)).exists()


def test_without_an_address_a_package_index_shows_names_of_files(description: Callable[[str, str | None, str], str]) -> None:
    readme = "# name\n\nfirst\n\n![a picture](docs/p.svg) of [it](a.md#x) ([how](b.md)), [c.md](c.md), [there](https://x.org)\n"
    code = "\n```python\na[b](c)\n```\n"
    title, first, note, text = description(readme + code, None, "1.2.3").split("\n\n", 3)
    assert (title, first) == ("# name", "first")
    assert "source distribution" in note
    assert text == "*a picture (picture: `docs/p.svg`)* of it (`a.md`) (`b.md`), `c.md`, [there](https://x.org)\n" + code
    assert "](" not in re.sub(r"```.*?```", "", description((ROOT / "README.md").read_text(), None, "1"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site_hooks.py"))


def test_lists_become_those_of_the_sites_markdown(hooks: dict[str, Any]) -> None:
    text = """text
* one
  goes on

  and on
  * inner
1. first

   ```toml
   [job]
   ```

no item
    code"""
    wanted = """text

* one
    goes on

    and on
    * inner
1. first

    ```toml
    [job]
    ```

no item
    code"""
    assert "\n".join(hooks["reindented"](text.splitlines())) == wanted


@pytest.mark.parametrize(
    ("page", "target", "path", "uri"),
    [
        ("data.md", "../launch/digits.toml", "launch/digits.toml", "repository/launch/digits.toml.md"),
        ("how-to/testing.md", "../reference/api.md", "docs/reference/api.md", "reference/api.md"),
        ("engines.md", "../examples/engine_plugin", "examples/engine_plugin", "repository/examples/engine_plugin/index.md"),
        ("project/README.md", "docs/data.md", "docs/data.md", "data.md"),
        ("index.md", "../README.md", "README.md", "project/README.md"),
    ],
)
def test_links_of_the_repository_have_pages_on_the_site(hooks: dict[str, Any], page: str, target: str, path: str, uri: str) -> None:
    assert hooks["in_repository"](page, target) == path
    assert hooks["page_of"](path) == uri


def test_links_elsewhere_are_left_alone(hooks: dict[str, Any]) -> None:
    for target in ("https://example.org/x.md", "mailto:a@b", "no-such-file.md"):
        assert hooks["in_repository"]("data.md", target) is None
