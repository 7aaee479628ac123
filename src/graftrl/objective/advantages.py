"""Group-relative advantages (GRPO; Shao et al., 2024; GRAFT, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def group_advantages(
    rewards: Tensor | NDArray[np.floating] | Sequence[float] | Sequence[Sequence[float]],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """a_i = (r_i - mean(r)) / (std(r) + eps), over the last axis.

    `std` has Bessel's correction, as in torch.std and verl. A group whose rewards are all equal gets exactly 0: the
    spread is tested, so that a rounding residue is never divided by a tiny deviation. Computed in float64.

    Args:
        rewards: [..., n], n >= 2.
        normalize_std: False only centres (Dr. GRPO).

    Returns:
        [..., n] in the dtype of a floating tensor or array, else float32.

    Raises:
        ValueError: fewer than 2 rewards on the last axis, or a non-finite reward.
    """
    given = rewards if isinstance(rewards, Tensor) else torch.from_numpy(np.array(rewards))  # a copy: may be read-only
    dtype = given.dtype if isinstance(rewards, Tensor | np.ndarray) and given.is_floating_point() else torch.float32
    r = given.to(torch.float64)
    if r.ndim == 0 or r.shape[-1] < 2:
        raise ValueError("a group needs at least 2 rewards: the standard deviation of one sample is undefined")
    if not torch.isfinite(r).all():
        raise ValueError("rewards must be finite")
    centred = r - r.mean(dim=-1, keepdim=True)
    if normalize_std:
        centred = centred / (r.std(dim=-1, keepdim=True) + eps)
    varies = r.amax(dim=-1, keepdim=True) > r.amin(dim=-1, keepdim=True)
    return torch.where(varies, centred, torch.zeros_like(centred)).to(dtype)
