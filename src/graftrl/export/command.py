"""Models of a run as folders for `from_pretrained`, whatever form their checkpoint has."""

from __future__ import annotations

from pathlib import Path

from graftrl.errors import ConfigError
from graftrl.evaluation.models import find_models
from graftrl.logs.folders import new_folder, writing
from graftrl.policies.loading import copy_model

_STAYS = ("optimizer.pt", "*.tmp", ".*")


def export(source: str, out: Path) -> tuple[list[Path], list[str]]:
    """Write the models of a checkpoint, weights and tokenizer; of several models, each into a folder of its name.

    Args:
        source: RUN, RUN:MODEL or RUN:MODEL@STEP; unless told otherwise the best checkpoint, else the last.
        out: the folder to write, which must not exist.

    Returns:
        the models' folders, and notes for people.

    Raises:
        ConfigError: not a trained model of a run. ModelError: a part of the checkpoint is missing or torn.
        DataError: `out` exists.
    """
    subjects = find_models([source], {})
    if any(subject.run is None or not subject.step for subject in subjects):
        raise ConfigError(f"{source}: name a run whose models were trained, as RUN, RUN:MODEL or RUN:MODEL@STEP")
    alone = len(subjects) == 1
    with new_folder(out) as folder:
        for subject in subjects:
            assert subject.model is not None
            target = folder if alone else folder / subject.model
            with writing(out):
                copy_model(subject.model, subject.settings, Path(subject.files_at), target, _STAYS)
    written = [out if alone or subject.model is None else out / subject.model for subject in subjects]
    return written, list(dict.fromkeys(subject.note for subject in subjects if subject.note is not None))
