"""The tiny models of the policies' tests, and this folder's helpers."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "policies"), str(Path(__file__).parent)]
