"""The laboratory's transfer: a proxy of 42,000 weights explores, a target of 91,000 with its tokenizer learns from it.

Proxy and target are strong in disjoint families. A second target, of another architecture and tokenizer, continues the
sequence. `python -m graftrl.lab.transfer` puts all three, warmed up, where recipes/transfer-lab.yaml finds them.
"""

from __future__ import annotations

from pathlib import Path

from graftrl.lab.cache import CACHE, ensure_warm_pair, link_names
from graftrl.lab.models import LAB_MODELS, LabModel
from graftrl.lab.warmup import WarmupSettings

PROXY = LabModel("P", "llama", "digit_comma", hidden_size=40, intermediate_size=96)
TARGET, SECOND = LAB_MODELS["A"], LAB_MODELS["B"]
PROXY_WARMUP = WarmupSettings(steps=1000, learning_rate=6e-3, strong_offset=1)


def prepare(cache: Path) -> dict[str, Path]:
    """Folders by name, P, A and B, each with a short link `<cache>/P` beside it; they come with the package."""
    folders = ensure_warm_pair(cache, models=(PROXY, TARGET, SECOND), settings={PROXY.name: PROXY_WARMUP})
    link_names(folders)
    return folders


if __name__ == "__main__":
    for name in prepare(Path("runs") / CACHE):
        print(Path("runs") / CACHE / name)
