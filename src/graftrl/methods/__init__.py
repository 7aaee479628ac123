"""The methods, each one short file, and how a recipe names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftrl.errors import ConfigError
from graftrl.methods.adaprefix import AdaPrefix
from graftrl.methods.avsd import AVSD
from graftrl.methods.base import Exchange, Method, StepContext, Transfer
from graftrl.methods.es import ES
from graftrl.methods.gapo import GAPO
from graftrl.methods.graft import GRAFT
from graftrl.methods.graft_variants import GRAFT_VARIANTS
from graftrl.methods.grpo import GRPO
from graftrl.methods.hacpo import HACPO
from graftrl.methods.luffy import LUFFY
from graftrl.methods.opd import OPD
from graftrl.methods.opd_ft import OPDFT
from graftrl.methods.opd_urm import OPDURM
from graftrl.methods.p_opd import POPD
from graftrl.methods.ra_opd import RAOPD
from graftrl.methods.replay import Replay
from graftrl.methods.rstg import RSTG
from graftrl.methods.scion import SCION
from graftrl.methods.sgt import SGT
from graftrl.methods.sgt_matched import SGTMatched
from graftrl.methods.w2s_opd import W2SOPD
from graftrl.own_code import import_named
from graftrl.settings import Settings

METHODS: dict[str, Any] = {
    "grpo": GRPO,
    "graft": GRAFT,
    "sgt": SGT,
    "hacpo": HACPO,
    "luffy": LUFFY,
    "scion": SCION,
    "sgt-matched": SGTMatched,
    "gapo": GAPO,
    "replay": Replay,
    "adaprefix": AdaPrefix,
    "es": ES,
    "opd": OPD,
    "opd_ft": OPDFT,
    "opd_urm": OPDURM,
    "p_opd": POPD,
    "w2s_opd": W2SOPD,
    "ra_opd": RAOPD,
    "rstg": RSTG,
    "avsd": AVSD,
    **GRAFT_VARIANTS,
}

# Named variants: one line of configuration each.
PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {"name": "grpo", "dynamic_sampling": True},
    "graft-no-gate": {"name": "graft", "weighting": "none"},
    "graft-no-floor": {"name": "graft", "weighting": "no_floor"},
    "graft-unbalanced": {"name": "graft", "balanced": False},
    "graft-admit-all-success": {"name": "graft", "admit_all_success": True},
    "graft-sequence-ratio": {"name": "graft", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "graft-success-only-no-floor": {"name": "graft-success-only", "weighting": "no_floor"},
    "graft-delta-0": {"name": "graft", "threshold": 0.0},
    "graft-delta-0.7": {"name": "graft", "threshold": 0.7},
    "graft-delta-0.8": {"name": "graft", "threshold": 0.8},
    "graft-delta-0.9": {"name": "graft", "threshold": 0.9},
    "graft-peer-first": {"name": "graft", "peer_position": "first"},
    "graft-peer-uniform": {"name": "graft", "peer_position": "uniform"},
    **{f"sgt-{value:g}": {"name": "sgt", "sft_coefficient": value} for value in (0.03, 0.3, 1.0)},
    "scion-headroom": {"name": "scion", "advantage": "headroom"},
    "scion-rated": {"name": "scion", "advantage": "rated"},
    "scion-no-advantage": {"name": "scion", "advantage": "one"},
    "scion-no-damping": {"name": "scion", "tau": 0.0},
    "scion-all-fail": {"name": "scion", "scope": "all_fail"},
    "scion-mean-transferred": {"name": "scion", "normalization": "transferred"},
    "scion-mean-tokens": {"name": "scion", "normalization": "tokens"},
    "scion-self": {"name": "scion", "imitate": "own", "advantage": "headroom"},
    "scion-self-first": {"name": "scion", "imitate": "own_first"},
    **{f"scion-tau-{value:g}": {"name": "scion", "tau": value} for value in (0.01, 0.03, 0.3, 1.0)},
    **{f"scion-lambda-{value:g}": {"name": "scion", "sft_coefficient": value} for value in (0.1, 0.3, 3.0, 10.0)},
}


def build_method(settings: str | Mapping[str, Any]) -> Method:
    """The method that a recipe's `method` section names.

    Args:
        settings: a name, or a mapping with `name` and the method's own options. A name is a method, a preset (its
            options can be overridden) or `module:Class` of the user's own.

    Raises:
        ConfigError: unknown name; pydantic's ValidationError for wrong options.
    """
    given = {"name": settings} if isinstance(settings, str) else dict(settings)
    name = str(given.pop("name", ""))
    if name in PRESETS:
        given = {**PRESETS[name], **given}
        name = given.pop("name")
    if name in METHODS:
        method_type = METHODS[name]
    elif ":" in name:
        method_type = _own_class(name)
    else:
        known = ", ".join([*METHODS, *PRESETS])
        raise ConfigError(f"method: unknown method {name!r}; known are {known}, or module:Class of your own")
    method: Method = method_type(method_type.settings_type.model_validate({**given, "name": name}))
    missing = [part for part in ("settings", "filter", "sampling_rounds") if not hasattr(method, part)]
    if missing:
        raise ConfigError(f"method: an instance of {name!r} lacks {', '.join(missing)}; see graftrl.methods.Method")
    return method


def _own_class(path: str) -> Any:
    """The user's class, once it has the parts of a method."""
    try:
        found = import_named(path)
    except ConfigError as error:
        raise ConfigError(f"method: {error}") from error
    parts = ("settings_type", "fewest_models", "exchange", "order", "objective")
    missing = [part for part in parts if not hasattr(found, part)]
    if missing:
        raise ConfigError(f"method: {path!r} lacks {', '.join(missing)}; see graftrl.methods.Method")
    settings = found.settings_type
    if not (isinstance(settings, type) and issubclass(settings, Settings) and "name" in settings.model_fields):
        raise ConfigError(
            f"method: the settings_type of {path!r} must be a subclass of graftrl.settings.Settings with a field `name`"
        )
    return found


__all__ = [
    "AVSD",
    "ES",
    "GAPO",
    "GRAFT",
    "GRPO",
    "HACPO",
    "LUFFY",
    "METHODS",
    "OPD",
    "OPDFT",
    "OPDURM",
    "POPD",
    "PRESETS",
    "RAOPD",
    "RSTG",
    "SCION",
    "SGT",
    "W2SOPD",
    "AdaPrefix",
    "Exchange",
    "Method",
    "Replay",
    "SGTMatched",
    "StepContext",
    "Transfer",
    "build_method",
]
