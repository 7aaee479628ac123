"""The site builds without a warning, shows every page, and fetches nothing."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return folder


def test_every_page_is_built_and_in_the_navigation(site):
    listed = (site / "index.html").read_text()
    navigation = re.findall(r'href="([^"#]+)"', re.sub(r"<main.*", "", listed, flags=re.DOTALL))
    for page in (ROOT / "docs").rglob("*.md"):
        address = page.relative_to(ROOT / "docs").as_posix().replace("README.md", "index.md").replace(".md", ".html")
        assert (site / address).is_file()
        assert address == "index.html" or address in set(navigation) | set(re.findall(r'href="([^"#]+)"', listed))


def test_nothing_is_fetched_from_another_machine(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"', text)
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)"', text)
        assert fetched and not [address for address in fetched if re.match(r"(https?:)?//", address)], page
    assert "fonts.googleapis" not in "".join(css.read_text() for css in site.rglob("*.css"))


@pytest.mark.parametrize(
    "module",
    ["graftrl.exchange", "graftrl.objective", "graftrl.tasks", "graftrl.integrations.trl"],
)
def test_the_reference_has_every_public_name(site, module):
    page = (site / "reference" / "python" / f"{module}.html").read_text()
    exported = importlib.import_module(module).__all__
    missing = [name for name in exported if not re.search(rf'id="{module}\.(\w+\.)?{name}"', page)]
    assert missing == []


def test_the_reference_has_the_parts_of_a_method(site):
    page = (site / "reference" / "python" / "graftrl.methods.html").read_text()
    for name in ("Method", "StepContext", "Exchange", "Transfer", "receiving", "own_rows", "peer_row", "row_scores"):
        assert f'id="graftrl.methods.base.{name}"' in page
    assert 'id="graftrl.methods.build_method"' in page


def test_fields_that_a_docstring_explains_are_a_list_with_types(site):
    page = (site / "reference" / "python" / "graftrl.rollout.html").read_text()
    entry = re.search(r"<li[^>]*>((?:(?!</li>).)*)is \"?stop.*?</li>", page, re.DOTALL)
    assert entry and "token_ids" in entry[1] and "NDArray" in entry[1]


def test_formulas_are_marked_for_the_script_that_draws_them(site):
    assert (site / "assets" / "katex" / "katex.min.js").is_file()
    assert '<span class="arithmatex">\\(' in (site / "numbers.html").read_text()
