"""Random numbers as a pure function of what they are for.

Every draw of a run comes from a generator seeded by (run seed, purpose, step, model). Nothing is carried from step to
step, so a resumed run draws the same numbers as an uninterrupted one and no random state can be lost.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(*parts))
