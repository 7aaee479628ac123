"""GRAFT inside a script for TRL's GRPOTrainer, and rollout logs of any such script.

GraftTrainer trains one model with TRL and learns from peers: from rollout logs, or from another process through a
shared folder. RolloutLogCallback writes the log of any GRPOTrainer, so that it can be a peer later.
"""

from graftrl.integrations.trl.support import check_version

check_version()

from graftrl.integrations.folder_exchange import FolderExchange  # noqa: E402
from graftrl.integrations.trl.rollout_log import RolloutLogCallback  # noqa: E402
from graftrl.integrations.trl.trainer import GraftConfig, GraftTrainer  # noqa: E402

__all__ = ["FolderExchange", "GraftConfig", "GraftTrainer", "RolloutLogCallback"]
