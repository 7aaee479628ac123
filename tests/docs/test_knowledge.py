"""The pages that explain numbers, differences and symptoms name what is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / name
    for name in (
        "numbers.md",
        "differences.md",
        "papers.md",
        "how-to/debug.md",
        "how-to/read-the-metrics.md",
        "how-to/choose-a-partner.md",
    )
]


def prose(page):
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_is_named_exists(page):
    named = [span for span in code_spans(page) if "::" in span]
    for span in named:
        file, _, test = span.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), span
    assert named or page.stem not in {"numbers", "differences"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_public_name_exists(page):
    for span in code_spans(page):
        if re.fullmatch(r"graftrl(\.\w+)+", span):
            module, _, name = span.rpartition(".")
            assert hasattr(importlib.import_module(module), name), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_source_file_exists(page):
    for span in code_spans(page):
        if re.match(r"(src|docs|recipes|benchmarks)/[\w./-]+\.\w+$", span):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_metric_is_one_of_the_list(page):
    """`models/NAME/loss`, `exchange/S->R/gated`: the last part stands in the table of that section."""
    listed = {}
    for section in re.split(r"^## ", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        listed.setdefault(section.partition("/")[0], set()).update(re.findall(r"`(\w+)`", " ".join(rows)))
    assert {"models", "exchange", "complementarity", "peers", "evaluation"} <= listed.keys()
    for span in code_spans(page):
        found = re.fullmatch(r"(models|exchange|complementarity|peers|evaluation)/[A-Z]\S*?/(\w+)(/\S+)?", span)
        if found:
            assert found[2] in listed[found[1]], span


def anchors(page):
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"`|\*|\[|\]\([^)]*\)", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_every_heading_that_is_linked_exists():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for file, anchor in re.findall(r"\]\(([^)\s:#]*\.md|)#([^)\s]+)\)", prose(page)):
            target = page.parent / file if file else page
            assert anchor in anchors(target), f"{page}: {file}#{anchor}"


def test_every_file_that_the_readme_links_exists():
    for link in re.findall(r"\]\(([^)#\s:]+)\)", prose(ROOT / "README.md")):
        assert (ROOT / link).exists(), link
