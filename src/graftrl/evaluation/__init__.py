"""Evaluation: pass@1, pass@k and their uncertainty."""

from graftrl.evaluation.passk import pass_at_k

__all__ = ["pass_at_k"]
