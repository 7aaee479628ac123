"""A folder for the hub from a checkpoint of a run: weights, tokenizer, card and recipe, without the optimizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from graftrl.errors import ConfigError, RunError
from graftrl.evaluation.models import Subject
from graftrl.logs.folders import new_folder, writing
from graftrl.policies.loading import copy_model
from graftrl.push.card import Trained, is_hub_id, public, public_recipe, write_card
from graftrl.training.run_folder import write_text
from graftrl.transfer.pairs import trained_model

_STAYS = ("optimizer.pt", "policy.json", "README.md", "*.bin", "*.pt", "*.pth", "*.tmp", ".*")


class Hub(Protocol):
    """The part of huggingface_hub's HfApi that is used."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool, repo_type: str) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, repo_type: str) -> Any: ...


@dataclass(frozen=True)
class PushRequest:
    """source: RUN, RUN:MODEL or RUN:MODEL@STEP. repo: on the hub. card_only: a folder to write instead. base_model: the
    hub id of what was trained, where the recipe names a path of this machine."""

    source: str
    repo: str | None = None
    card_only: Path | None = None
    private: bool = False
    license_id: str | None = None
    base_model: str | None = None


def push(request: PushRequest, hub: Callable[[], Hub] = HfApi) -> tuple[str, list[str]]:
    """Write the folder, and upload it unless it is only to be written.

    Returns:
        where it is now, and notes for people.

    Raises:
        ConfigError: no trained model of that name; no repository, or not the name of one.
        RunError: the folder exists; the hub refuses.
    """
    if (request.repo is None) == (request.card_only is None):
        raise ConfigError("name a repository on the hub, such as user/name, or --card-only DIR")
    if request.repo is not None:
        _check_repo(request.repo)
    subject = trained_model(request.source)
    checkpoint = Path(subject.files_at)
    policy = json.loads((checkpoint / "policy.json").read_text(encoding="utf-8"))
    trained = Trained.of(subject, request.base_model, policy)
    notes = [note for note in (subject.note,) if note is not None]
    if not is_hub_id(trained.base):
        notes.append(
            f"the recipe trained from {public(trained.base)!r}, a path of this machine; --base-model says what readers "
            "know it as"
        )
    if request.card_only is not None:
        with new_folder(request.card_only) as folder:
            _fill(folder, subject, trained, request)
        return str(request.card_only), notes
    assert request.repo is not None
    with tempfile.TemporaryDirectory() as temporary:
        _fill(Path(temporary), subject, trained, request)
        message = f"{trained.recipe.name}, step {trained.step}"
        return _upload(hub(), request.repo, request.private, temporary, message), notes


def _fill(folder: Path, subject: Subject, trained: Trained, request: PushRequest) -> None:
    checkpoint = Path(subject.files_at)
    with writing(folder):
        copy_model(subject.name, subject.settings, checkpoint, folder, _STAYS)
        write_text(folder / "README.md", write_card(trained, request.repo, request.license_id))
        recipe = yaml.safe_dump(public_recipe(trained.recipe), sort_keys=False, allow_unicode=True)
        write_text(folder / "recipe.yaml", recipe)
        _name_base(folder / "adapter_config.json", trained.base)


def _name_base(config: Path, base: str) -> None:
    """An adapter says which model it is for: as readers know it."""
    if config.is_file():
        content = json.loads(config.read_text(encoding="utf-8"))
        write_text(config, json.dumps({**content, "base_model_name_or_path": public(base)}, indent=2) + "\n")


def _check_repo(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo}: not the name of a repository on the hub: {str(error).splitlines()[0]}") from error


def _upload(hub: Hub, repo: str, private: bool, folder: str, message: str) -> str:
    try:
        hub.create_repo(repo, private=private or None, exist_ok=True, repo_type="model")
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, repo_type="model")
    except (HTTPError, OSError) as error:  # of no connection, and the hub's own, which are OSErrors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"{repo}: cannot be pushed: {reason}; 'hf auth login' signs in, --card-only DIR writes the folder on this "
            "machine"
        ) from error
    return f"https://huggingface.co/{repo}"
