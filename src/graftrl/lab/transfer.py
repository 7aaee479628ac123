"""The laboratory's transfer: a proxy of 42,000 weights explores, a target of 91,000 with its tokenizer learns from it.

Proxy and target are strong in disjoint families. A second target, of another architecture and tokenizer, continues the
sequence. `python -m graftrl.lab.transfer` puts all three, warmed up, where recipes/transfer-lab.yaml finds them.
"""

from __future__ import annotations

from pathlib import Path

from graftrl.lab.cache import CACHE, ensure_warm_pair, link_names
from graftrl.lab.models import LAB_MODELS

PROXY, TARGET, SECOND = LAB_MODELS["P"], LAB_MODELS["A"], LAB_MODELS["B"]


def prepare(cache: Path) -> dict[str, Path]:
    """Folders by name, P, A and B, each with a short link `<cache>/P` beside it; they come with the package."""
    folders = ensure_warm_pair(cache, models=(PROXY, TARGET, SECOND))
    link_names(folders)
    return folders


if __name__ == "__main__":
    for name in prepare(Path("runs") / CACHE):
        print(Path("runs") / CACHE / name)
