"""Exchange between models: which groups travel, how much each response counts, and in whose tokens it is trained.

Pure functions over counts, log-probabilities and strings; no torch, no model.
"""

from graftrl.exchange.compatibility import (
    compatibility_score,
    compatibility_scores,
    compatibility_weight,
    compatibility_weights,
    mean_logprobs,
)
from graftrl.exchange.retokenize import Rejected, Retokenized, encode_response, retokenize, same_tokenizer
from graftrl.exchange.selection import (
    all_fail_overlap,
    complementary_candidates,
    is_complementary,
    select_complementary,
)

__all__ = [
    "Rejected",
    "Retokenized",
    "all_fail_overlap",
    "compatibility_score",
    "compatibility_scores",
    "compatibility_weight",
    "compatibility_weights",
    "complementary_candidates",
    "encode_response",
    "is_complementary",
    "mean_logprobs",
    "retokenize",
    "same_tokenizer",
    "select_complementary",
]
