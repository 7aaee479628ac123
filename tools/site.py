"""Hooks of `make docs`: what the site has besides the pages in docs/, which are written to be read on GitHub too.

- Pages of the Python interface, whose text is in the docstrings, and the changelog.
- A place in the navigation for every page that mkdocs.yml does not name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

# Page -> modules whose public names it lists, or single names. The methods themselves have pages of their own.
INTERFACE = {
    "graftrl": ["graftrl.api", "graftrl.errors"],
    "graftrl.exchange": ["graftrl.exchange", "graftrl.exchange.retokenize.retokenize"],  # which hides behind its module
    "graftrl.objective": ["graftrl.objective"],
    "graftrl.methods": ["graftrl.methods.build_method", "graftrl.methods.base", "graftrl.methods.extensions"],
    "graftrl.rollout": ["graftrl.rollout"],
    "graftrl.tasks": ["graftrl.tasks", "graftrl.tasks.base"],
    "graftrl.logs": ["graftrl.logs.reader", "graftrl.logs.rollouts"],
    "graftrl.evaluation": [
        "graftrl.evaluation.passk",
        "graftrl.evaluation.intervals",
        "graftrl.evaluation.significance",
    ],
    "graftrl.integrations.trl": ["graftrl.integrations.trl"],
}

# Folder of a page that mkdocs.yml does not name -> the section it goes to; the first that fits.
SECTIONS = {
    "how-to/": "Guides",
    "methods/": "Methods",
    "reference/": "Reference",
    "results/": "Results",
    "": "Background",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, modules in INTERFACE.items():
        level = 1 if modules == [name] else 2
        text = f"---\ntitle: {name}\n---\n\n" + (f"# {name}\n\n" if level == 2 else "")
        text += "\n\n".join(f"::: {module}\n    options:\n      heading_level: {level}" for module in modules)
        files.append(File.generated(config, f"reference/python/{name}.md", content=text))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    config.nav = complete(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def complete(nav: list[dict[str, list[Any]]], pages: list[str]) -> list[dict[str, list[Any]]]:
    """The navigation without pages that are not there, and with all that it does not name."""
    sections = {name: [page for page in of if page in pages] for section in nav for name, of in section.items()}
    named = {page for of in sections.values() for page in of}
    for page in pages:
        if page not in named:
            section = next(section for folder, section in SECTIONS.items() if page.startswith(folder))
            sections[section].append(page)
    sections["Reference"] = _folded(sections["Reference"], "reference/python/", "Python")
    return [{name: of} for name, of in sections.items()]


def _folded(pages: list[str], folder: str, title: str) -> list[Any]:
    inside = [page for page in pages if page.startswith(folder)]
    return [*(page for page in pages if page not in inside), {title: inside}]
