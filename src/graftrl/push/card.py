"""The model card of a trained checkpoint: method, data, results and where it comes from, all read from its run.

Paths of this machine are cut to their last part: they help nobody else and may say more than they should.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graftrl import __version__
from graftrl.config import Recipe
from graftrl.errors import RunError
from graftrl.evaluation.models import Subject
from graftrl.logs.config import PeerSettings
from graftrl.report.data import read_runs
from graftrl.report.tables import markdown_table
from graftrl.tasks.config import DataSource
from graftrl.training.run_folder import RunFolder
from graftrl.transfer.pairs import Gain, gain_of

_PLACES = ("path", "log", "live", "adapter")  # keys of a recipe that may hold a path of this machine


@dataclass(frozen=True)
class Trained:
    """A trained model and its run. base: what it was trained from. fingerprint: of its tokenizer."""

    recipe: Recipe
    run: RunFolder
    model: str
    step: int
    base: str
    adapter: bool
    needs_bos: bool
    fingerprint: str

    @classmethod
    def of(cls, subject: Subject, base: str | None, policy: Mapping[str, Any]) -> Trained:
        assert subject.recipe is not None and subject.run is not None and subject.model is not None
        return cls(
            recipe=subject.recipe,
            run=subject.run,
            model=subject.model,
            step=subject.step or 0,
            base=base or subject.recipe.models[subject.model].path,
            adapter=subject.adapter is not None,
            needs_bos=bool(policy["prepend_bos"]),
            fingerprint=str(policy["tokenizer_fingerprint"]),
        )


def public(place: str) -> str:
    """A hub id as it is; of a path of this machine the last part."""
    path = Path(place).expanduser()
    local = path.exists() or place.startswith((".", "/", "~")) or place.count("/") > 1 or "\\" in place
    return path.name if local else place


def is_hub_id(place: str) -> bool:
    return public(place) == place and "/" in place


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """The complete recipe without paths of this machine."""

    def cut(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: cut(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [cut(item, key) for item in value]
        return public(value) if key in _PLACES and isinstance(value, str) else value

    found: dict[str, Any] = cut(recipe.model_dump(mode="json"))
    return found


def write_card(trained: Trained, repo: str | None, license_id: str | None) -> str:
    """The text of README.md. repo: where the model will be; None: not known yet."""
    title = repo.rpartition("/")[2] if repo else f"{trained.recipe.name}-{trained.model}"
    parts = [
        f"---\n{yaml.safe_dump(_metadata(trained, license_id), sort_keys=False)}---",
        f"# {title}",
        _summary(trained),
        "## Method\n\n" + _method(trained.recipe),
        "## Data\n\n" + _data(trained.recipe),
        "## Results\n\n" + _results(trained),
        "## Training\n\n" + _training(trained),
        "## Use\n\n" + _use(trained, repo or "PATH"),
        "## Provenance\n\n" + _provenance(trained),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(trained: Trained, license_id: str | None) -> dict[str, Any]:
    """What the hub reads: only what is known."""
    recipe = trained.recipe
    hub = [source.hub for source in _sources(recipe) if source.hub is not None]
    return {
        **({"license": license_id} if license_id else {}),
        "library_name": "peft" if trained.adapter else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": trained.base} if is_hub_id(trained.base) else {}),
        **({"datasets": list(dict.fromkeys(hub))} if hub else {}),
        "tags": ["graftrl", "reinforcement-learning", recipe.method.name],
    }


def _summary(trained: Trained) -> str:
    recipe, base = trained.recipe, public(trained.base)
    others = [name for name in recipe.models if name != trained.model]
    company = f", side by side with {', '.join(others)}" if others else ""
    stored = [name for name, peer in recipe.peers.items() if isinstance(peer, PeerSettings)]
    elsewhere = [name for name in recipe.peers if name not in stored]
    peers = f"; it also learned from rollout logs of {', '.join(stored)}" if stored else ""
    peers += f"; and from {', '.join(elsewhere)}, which trained in another job at the same time" if elsewhere else ""
    what = f"A LoRA adapter for `{base}`" if trained.adapter else f"`{base}`"
    return (
        f"{what}, trained by reinforcement learning on verifiable rewards: {trained.step} steps of "
        f"`{recipe.method.name}` with graftrl {__version__}{company}{peers}."
    )


def _method(recipe: Recipe) -> str:
    module = sys.modules[type(recipe.build_method()).__module__]
    about = (module.__doc__ or "").strip().splitlines()[0]
    settings = recipe.method.model_dump(mode="json")
    rows = [[f"`{key}`", f"`{value}`"] for key, value in settings.items() if key != "name"]
    return f"{about}\n\n{markdown_table(['option', 'value'], rows)}"


def _sources(recipe: Recipe) -> list[DataSource]:
    found = [getattr(recipe.task, part, None) for part in ("train", "validation")]
    return [source for source in found if isinstance(source, DataSource)]


def _data(recipe: Recipe) -> str:
    task = public_recipe(recipe)["task"]
    shown = {key: value for key, value in task.items() if value is not None}
    return (
        f"Task `{recipe.task.kind}`. Responses were graded by its verifier; training rollouts came from the model's "
        f"own distribution, of at most {recipe.sampling.max_response_tokens} tokens.\n\n"
        f"```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)}```"
    )


def _results(trained: Trained) -> str:
    gain = gain_of(trained.run, trained.model, trained.step)
    if gain is None:
        return "The run was not validated both before training and at this step, so nothing is known about its results."
    evaluation = trained.recipe.evaluation
    return (
        f"pass@1 on the run's own {gain.problems} validation prompts, {gain.samples} response"
        f"{'s' if gain.samples > 1 else ''} each at temperature {evaluation.temperature:g} and top-p "
        f"{evaluation.top_p:g}; the interval of the difference is a 95 % bootstrap over prompts. They are of one "
        "training run, and nothing else was evaluated.\n\n"
        + markdown_table(["before", "after", "difference"], [_gain_cells(gain)], 0)
    )


def _gain_cells(gain: Gain) -> list[str]:
    return [f"{gain.before:.3f}", f"{gain.after:.3f}", gain.text]


def _training(trained: Trained) -> str:
    recipe = trained.recipe
    lines = [line for line in read_runs([trained.run.root])[0].metrics if line["step"] <= trained.step]
    if not lines:
        raise RunError(f"{trained.run.root}: has no metrics up to step {trained.step}")
    of_model = [line["models"][trained.model] for line in lines]
    settings, training = recipe.models[trained.model], recipe.training
    rows = [
        ["steps", f"{trained.step}"],
        ["prompts a step, responses each", f"{training.prompts_per_step}, {training.group_size}"],
        ["prompts an optimizer step", f"{training.minibatch_prompts}"],
        ["learning rate (AdamW)", f"{settings.optimizer.lr:g}"],
        ["precision", settings.dtype + ("" if settings.lora is None else f", LoRA of rank {settings.lora.rank}")],
        ["sampled tokens", f"{sum(m.get('sampled_tokens', 0) for m in of_model):,}"],
        ["trained tokens", f"{sum(sum(m.get('trained_tokens', {}).values()) for m in of_model):,}"],
        ["seconds, of all models of the run", f"{lines[-1]['wall_s']:,.0f}"],
        *_received(lines, trained.model),
    ]
    return markdown_table(["", ""], rows)


def _received(lines: Sequence[Mapping[str, Any]], model: str) -> list[list[str]]:
    """What came from each peer over all steps."""
    totals: dict[str, tuple[int, int]] = {}
    for line in lines:
        for direction, stats in line["exchange"].items():
            source, _, receiver = direction.partition("->")
            if receiver == model:
                prompts, responses = totals.get(source, (0, 0))
                totals[source] = prompts + stats.get("selected", 0), responses + stats.get("admitted", 0)
    return [
        [f"from {source}", f"{responses:,} responses on {prompts:,} prompts"]
        for source, (prompts, responses) in totals.items()
    ]


def _use(trained: Trained, place: str) -> str:
    load = (
        "peft import AutoPeftModelForCausalLM as Model"
        if trained.adapter
        else "transformers import AutoModelForCausalLM as Model"
    )
    settings = trained.recipe.models[trained.model]
    hints = []
    if trained.needs_bos:
        hints.append("Prompts must begin with the tokenizer's BOS, which it does not add by itself.")
    if settings.chat_template == "plain":
        hints.append("It was trained on prompts as plain text, without a chat template.")
    if settings.chat_template_options:
        hints.append(f"Its chat template was rendered with {settings.chat_template_options}.")
    if settings.extra_stop_tokens:
        hints.append(f"Responses end with one of {settings.extra_stop_tokens} too.")
    code = (
        f"```python\nfrom {load}\nfrom transformers import AutoTokenizer\n\n"
        f'model = Model.from_pretrained("{place}")\ntokenizer = AutoTokenizer.from_pretrained("{place}")\n```'
    )
    return "\n\n".join([code, *hints])


def _provenance(trained: Trained) -> str:
    recipe = trained.recipe
    others = {f"`{name}` of the same run": public(m.path) for name, m in recipe.models.items() if name != trained.model}
    logs = {
        f"peer `{name}`": ", ".join(public(str(log)) for log in peer.log)
        for name, peer in recipe.peers.items()
        if isinstance(peer, PeerSettings)
    }
    frozen = {f"scorer `{name}`": public(scorer.path) for name, scorer in recipe.scorers.items()}
    facts = {
        "run": recipe.name,
        "step": str(trained.step),
        "seed": str(recipe.seed),
        "trained from": public(trained.base),
        **others,
        **logs,
        **frozen,
        "tokenizer fingerprint": trained.fingerprint,
        "written by": f"graftrl {__version__}",
    }
    return markdown_table(["", ""], [[key, value] for key, value in facts.items()]) + (
        "\n\n`recipe.yaml` in this repository is the complete recipe; paths of the machine are cut to their last part."
    )
