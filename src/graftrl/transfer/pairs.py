"""A proxy pair on disk: a model before and after its reinforcement learning, what it was trained on, what it gained.

PAIR/proxy.json     what is in this folder, where it comes from, its measured gain
PAIR/recipe.yaml    of the run
PAIR/base/          the model before (absent where it is a hub id, or was left in its place)
PAIR/expert/        the model after: whole weights, or a LoRA adapter on the base
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from graftrl import __version__
from graftrl.config import Recipe, dump_recipe, load_recipe
from graftrl.errors import ConfigError, DataError, RunError
from graftrl.evaluation.intervals import bootstrap_interval
from graftrl.evaluation.models import Subject, find_models
from graftrl.policies.config import ScorerSettings
from graftrl.policies.loading import copy_model, load_skeleton
from graftrl.settings import Settings
from graftrl.training.run_folder import RunFolder, disk_errors, write_text

FILE, RECIPE = "proxy.json", "recipe.yaml"
_LEFT_BEHIND = ("optimizer.pt", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", ".cache", ".git")


class Gain(Settings):
    """pass@1 on the run's validation prompts, before and after; the bounds are of the difference's 95 % bootstrap
    interval over prompts, whose samples are paired."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    problems: int
    samples: int

    @property
    def text(self) -> str:
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class Provenance(Settings):
    """The run that made the expert. step: finished steps. tokens and seconds: of the whole run up to there."""

    run: str
    model: str
    method: str
    task: str
    seed: int
    step: int
    sampled_tokens: int
    wall_s: float
    graftrl: str


class ProxyPair(Settings):
    """What `proxy.json` holds. base, expert: as scorers; paths inside the folder are relative to it."""

    schema_version: Literal[1] = 1
    name: str
    saved: str
    parameters: int = Field(ge=1)
    tokenizer_fingerprint: str
    base: ScorerSettings
    expert: ScorerSettings
    provenance: Provenance
    gain: Gain | None

    @property
    def summary(self) -> str:
        p, gain = self.provenance, self.gain
        gained = "gain not measured" if gain is None else f"pass@1 {gain.before:.3f} to {gain.after:.3f}, {gain.text}"
        return f"{p.model} of {p.run} after {p.step} steps of {p.method}; {gained}"

    def scorers(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Options of the scorers `base` and `expert`, with paths that work from anywhere."""

        def placed(settings: ScorerSettings) -> dict[str, Any]:
            options = settings.model_dump(mode="json", exclude_defaults=True)
            for key in ("path", "adapter"):
                if key in options and (folder / options[key]).exists():
                    options[key] = str((folder / options[key]).resolve())
            return options

        return {"expert": placed(self.expert), "base": placed(self.base)}


def read_pair(folder: Path) -> ProxyPair:
    """Raises DataError for a folder that is no proxy pair, or one that lacks a part."""
    try:
        pair = ProxyPair.model_validate_json((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no proxy pair (it has no {FILE}); 'graftrl proxies save' makes one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / FILE}: cannot be read: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise DataError(f"{folder / FILE}: {where}: {problem['msg']}") from error
    for settings in (pair.base, pair.expert):
        for part in (settings.path, settings.adapter):
            if part and part.split("/")[0] in ("base", "expert") and not (folder / part).exists():
                raise DataError(f"{folder}: its {part}/ is missing")
    return pair


def find_pairs(root: Path) -> Iterator[tuple[Path, ProxyPair | DataError]]:
    """The folder itself or the pairs in it, by name; for each that cannot be read, why.

    Raises:
        DataError: no such folder.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    folders = [root] if (root / FILE).exists() else sorted(path.parent for path in root.glob(f"*/{FILE}"))
    for folder in folders:
        try:
            yield folder, read_pair(folder)
        except DataError as error:
            yield folder, error


def save_pair(source: str, out: Path, *, copy_base: bool = True) -> tuple[ProxyPair, list[str]]:
    """Make a proxy pair of a run: its model before training, and at a checkpoint.

    Args:
        source: `RUN`, `RUN:MODEL` or `RUN:MODEL@STEP`; unless told otherwise the best checkpoint, else the last.
        out: the folder to write, which must not exist.
        copy_base: False records where the base lies instead of copying it; a hub id is always recorded.

    Returns:
        the pair, and notes for people.

    Raises:
        RunError: `out` exists; no such run, model, step. ConfigError: several models to choose from.
    """
    if out.exists():
        raise RunError(f"{out} already exists; choose another --out")
    expert = trained_model(source)
    assert expert.run is not None and expert.model is not None and expert.recipe is not None
    (base,) = find_models([f"{expert.run.root}:{expert.model}@0"], {})
    notes = [note for note in (expert.note,) if note is not None]
    gain = gain_of(expert.run, expert.model, expert.step or 0)
    if gain is None:
        notes.append(
            f"{expert.run.root} was not validated before training and at step {expert.step}, so the pair's gain is "
            "not known (evaluation.before, evaluation.every)"
        )
    temporary = out.with_name(f".{out.name}.tmp")
    with disk_errors(out, again="save the pair again", option="--out"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        copy_model(expert.name, expert.settings, Path(expert.files_at), temporary / "expert", _LEFT_BEHIND)
        base_path = base.settings.path
        local = Path(base_path).expanduser()
        if local.exists() and copy_base:
            base_path = _copy(local, temporary / "base")
        elif local.exists():
            base_path = str(local.resolve())
        pair = _describe(out.name, expert, base_path, gain)
        write_text(temporary / RECIPE, dump_recipe(expert.recipe))
        write_text(temporary / FILE, pair.model_dump_json(indent=1) + "\n")
        temporary.rename(out)
    return pair, notes


def trained_model(source: str) -> Subject:
    """The model that `RUN`, `RUN:MODEL` or `RUN:MODEL@STEP` names. Raises ConfigError unless it is one, and trained."""
    found = find_models([source], {})
    if found[0].run is None or not found[0].step:
        raise ConfigError(f"{source}: name a run whose model was trained, as RUN, RUN:MODEL or RUN:MODEL@STEP")
    if len(found) > 1:
        names = ", ".join(subject.model or "" for subject in found)
        raise ConfigError(f"{source} trained several models ({names}); say which, as {source}:{found[0].model}")
    return found[0]


def _describe(name: str, expert: Subject, base_path: str, gain: Gain | None) -> ProxyPair:
    assert expert.run is not None and expert.model is not None and expert.recipe is not None
    skeleton, codec = load_skeleton(expert.model, expert.settings)
    state = json.loads((expert.run.checkpoint(expert.step or 0) / "state.json").read_text())
    shared = {
        key: getattr(expert.settings, key)
        for key in ("dtype", "trust_remote_code", "chat_template", "chat_template_options", "bos", "extra_stop_tokens")
    }
    adapted = expert.adapter is not None
    return ProxyPair(
        name=name,
        saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        tokenizer_fingerprint=codec.fingerprint,
        base=ScorerSettings(path=base_path, **shared),
        expert=ScorerSettings(path=base_path if adapted else "expert", adapter="expert" if adapted else None, **shared),
        provenance=Provenance(
            run=expert.recipe.name,
            model=expert.model,
            method=expert.recipe.method.name,
            task=expert.recipe.task.kind,
            seed=expert.recipe.seed,
            step=expert.step or 0,
            sampled_tokens=state["sampled_tokens"],
            wall_s=state["wall_s"],
            graftrl=__version__,
        ),
        gain=gain,
    )


def gain_of(run: RunFolder, model: str, step: int) -> Gain | None:
    """None where the run was not validated at both steps."""
    files = [run.step_file("evaluations", when) for when in (0, step)]
    if not all(file.exists() for file in files):
        return None
    before, after = (json.loads(file.read_text()) for file in files)
    samples = after["results"][model]["samples"]
    solved, solved_before = after["successes"][model], before["successes"][model]
    difference, low, high = bootstrap_interval([(solved[q] - solved_before[q]) / samples for q in solved])
    return Gain(
        before=before["results"][model]["pass_at_1"],
        after=after["results"][model]["pass_at_1"],
        difference=difference,
        low=low,
        high=high,
        problems=len(solved),
        samples=samples,
    )


def _copy(source: Path, target: Path) -> str:
    """Copy a model's folder or GGUF file; returns the path inside the pair."""
    if source.is_file():
        target.mkdir()
        shutil.copy2(source, target / source.name)
        return f"{target.name}/{source.name}"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
    return target.name


def recipe_of(folder: Path) -> Recipe:
    """The recipe of the run that made a pair."""
    return load_recipe(folder / RECIPE)
