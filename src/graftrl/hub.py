"""The model hub when it cannot be reached: told within seconds, where its client would try again for a minute."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

WAIT_S = 5.0  # for an answer to the one question
_TRUST_S = 60.0  # how long an answer counts for the whole process

_asked: dict[str, tuple[float, str | None]] = {}  # endpoint -> when, and what was in the way


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Within, hub ids are read from the local cache alone if the hub does not answer a first question.

    Yields:
        why the hub is out of reach, as a clause; None where it is not.
    """
    obstacle = _obstacle()
    datasets: Any = sys.modules.get("datasets.config")  # keeps a copy of the setting
    before = constants.HF_HUB_OFFLINE, getattr(datasets, "HF_HUB_OFFLINE", None)
    if obstacle is None or before[0]:
        yield obstacle
        return
    try:
        constants.HF_HUB_OFFLINE = True
        if datasets is not None:
            datasets.HF_HUB_OFFLINE = True
        yield obstacle
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        if datasets is not None:
            datasets.HF_HUB_OFFLINE = before[1]


def _obstacle() -> str | None:
    if constants.HF_HUB_OFFLINE:
        name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
        return f"{name} is set, so that it is not asked"
    when, obstacle = _asked.get(constants.ENDPOINT, (-_TRUST_S, None))
    if time.monotonic() - when > _TRUST_S:
        try:
            get_session().head(constants.ENDPOINT, timeout=WAIT_S)
            obstacle = None
        except (HTTPError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            obstacle = f"{constants.ENDPOINT} does not answer ({reason}); HF_ENDPOINT names a mirror"
        _asked[constants.ENDPOINT] = time.monotonic(), obstacle
    return obstacle
