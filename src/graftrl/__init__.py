"""graftrl: cross-model RL post-training.

Several language models train by reinforcement learning on verifiable rewards and learn from each other's rollouts.

    run = graftrl.train("recipes/quickstart.yaml", {"training.steps": 10}, run="runs/mine")
    run.metrics                      # a Polars DataFrame
    graftrl.Run("runs/mine").rollouts(10)

Names are imported on first use: `import graftrl` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftrl.api import Callback, Run, resume, train

__version__ = "0.1.0"

_HOMES = {"Callback": "graftrl.api", "Run": "graftrl.api", "resume": "graftrl.api", "train": "graftrl.api"}

__all__ = ["Callback", "Run", "__version__", "resume", "train"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
