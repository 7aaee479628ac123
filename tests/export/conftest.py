"""The toy task, and several ranks for checkpoints in parts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
