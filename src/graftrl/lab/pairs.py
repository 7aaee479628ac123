"""The laboratory's pairs of models, its transfers between models, and the regimes in which they train, as data.

A study names pairs or transfers; what is added to `REGIMES`, `PAIRS` and `TRANSFERS` here can be trained by every one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftrl.errors import ConfigError
from graftrl.lab.cache import LabTask, ensure_warm_pair, warm_folders
from graftrl.lab.models import LAB_MODELS
from graftrl.lab.programs import HiddenProgramsConfig
from graftrl.lab.warmup import WARMUPS, WarmupSettings
from graftrl.tasks.config import ReasoningGymConfig


@dataclass(frozen=True)
class Regime:
    """A variation of the task, of the warm-up, or of both.

    task: settings of the task that differ from its defaults.
    warmup: per model, settings of its warm-up that differ from the model's preset.
    recipe: further overrides (`key=value`) of the recipe.
    steps: instead of the recipe's. checkpoints: so many of each run are kept, evenly spaced, rather than the newest.
    models: of its pair. home: the regime whose runs are its own, where only the pair or the peers differ.
    stored: methods that exchange read the log of the peer's own run of the baseline, in place of the peer.
    held_out: kept for the end. Nothing but the baseline is trained here before a rule is frozen.
    effort: of a run, relative to lists of the same length in plain form; what expected times are told from.
    """

    name: str
    description: str
    task: Mapping[str, Any] = field(default_factory=dict)
    warmup: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recipe: tuple[str, ...] = ()
    steps: int | None = None
    checkpoints: int | None = None
    models: tuple[str, ...] = ("A", "B")
    home: str | None = None
    stored: bool = False
    held_out: bool = False
    effort: float = 1.0

    @property
    def runs_in(self) -> str:
        """The regime that its runs are filed under."""
        return self.home or self.name

    @property
    def other_task(self) -> bool:
        """Whether `task` is a whole task, not settings of hidden programs."""
        return "kind" in self.task

    def task_config(self) -> LabTask:
        """As a warm-up sees it: with the default number of validation prompts."""
        return (ReasoningGymConfig if self.other_task else HiddenProgramsConfig).model_validate(self.task)

    def warmups(self) -> dict[str, WarmupSettings]:
        """Of the models whose warm-up differs from their preset."""
        return {model: WARMUPS[model].model_copy(update=dict(changed)) for model, changed in self.warmup.items()}

    def model_folders(self, cache: Path) -> dict[str, Path]:
        """Where the warmed-up models of this regime lie in `cache`, built or not."""
        return warm_folders(cache, self.task_config(), list(LAB_MODELS.values()), self.warmups())

    def warm(self, cache: Path, models: Iterable[str]) -> dict[str, Path]:
        """Builds those of the models that are missing; about a minute each."""
        wanted = [LAB_MODELS[name] for name in models]
        return ensure_warm_pair(cache, self.task_config(), wanted, self.warmups())


@dataclass(frozen=True)
class Pair:
    """Two models in a regime, or more. In the regime `base` the name is that of the models, else the regime follows."""

    models: tuple[str, ...]
    regime: str = "base"

    @property
    def name(self) -> str:
        return "-".join(self.models if self.regime == "base" else (*self.models, self.regime))

    @property
    def description(self) -> str:
        return REGIMES[self.regime].description

    def peer_of(self, model: str) -> str:
        """Raises ConfigError where there is not exactly one."""
        if len(self.models) != 2:
            raise ConfigError(f"{self.name}: a stored peer is the other one of two models, and here are more")
        return self.models[1] if model == self.models[0] else self.models[0]


@dataclass(frozen=True)
class Transfer:
    """A target that learns from what training changed in a proxy.

    proxies: the first explores by the baseline, each further one has learnt from the one before it, the last teaches
        the target. None: the target alone.
    trained: the target starts where its own run of the baseline ended.
    """

    proxies: tuple[str, ...]
    target: str
    description: str
    trained: bool = False
    regime: str = "transfer"

    @property
    def label(self) -> str:
        """Of the target."""
        return f"{self.target}_trained" if self.trained else self.target

    @property
    def name(self) -> str:
        return "-".join((*self.proxies, self.label))

    @property
    def models(self) -> tuple[str, ...]:
        return (self.target,)


# Phrasings are of one length: with the steps at shifting positions a model this small learns to execute far later.
_WORDS = (("first ", " then "),)
_MORE_WORDS = (("we apply ", " and then "),)

REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("base", "lists of 8 digits, responses of 20 to 22 tokens"),
        Regime(
            "short",
            "lists of 4 digits, responses of 12 to 14 tokens: few successes of a peer pass GRAFT's gate",
            task={"length": 4},
            recipe=("sampling.max_response_tokens=20",),
        ),
        Regime(
            "long",
            "lists of 10 digits, responses of 24 to 26 tokens; warm-ups twice as long",
            task={"length": 10},
            warmup={name: {"steps": 2 * WARMUPS[name].steps} for name in LAB_MODELS},
            recipe=("sampling.max_response_tokens=36",),
        ),
        # With program_seed 1, A executes only .85 of the programs that it names after its warm-up.
        Regime("programs", "another draw of the hidden programs", task={"program_seed": 2}),
        Regime(
            "style",
            "model B separates the two steps of a response by | where the others write ;",
            warmup={"B": {"separator": "|"}},
        ),
        Regime(
            "lenient",
            "an imperfect verifier: in training it counts a fixed 10 % of wrong lists as right",
            task={"false_positives": 0.1},
        ),
        Regime("stored", "the log of the peer's own GRPO run in place of the peer", home="base", stored=True),
        Regime("three", "three peers at once", models=("A", "B", "C"), home="base"),
        Regime("unequal", "one model has ten times the weights of the other", models=("P", "D")),
        Regime(
            "weak", "model B was warmed up so shortly that it is right far less often", warmup={"B": {"steps": 320}}
        ),
        Regime(
            "misled",
            "model B takes the program of family j for another, which gives the same list in 3 of 10 prompts",
            warmup={"B": {"misled": {"j": "DG"}}},
        ),
        Regime(
            "worded",
            "responses in words, three ways for either model, one of them shared; in 15 % of demonstrations a digit of "
            "the first list is wrong though the answer is right",
            warmup={
                "A": {"steps": 600, "slips": 0.15, "phrasings": (*_WORDS, ("we do ", " next "), ("apply ", " thus "))},
                "B": {"steps": 700, "slips": 0.15, "phrasings": (*_WORDS, ("begin ", " also "), ("it is ", " and a "))},
            },
            recipe=("sampling.max_response_tokens=45",),
            effort=1.3,
        ),
        Regime(
            "lengthy",
            "responses of 38 to 40 tokens, half of them fixed words",
            warmup={"A": {"steps": 450, "phrasings": _MORE_WORDS}, "B": {"steps": 600, "phrasings": _MORE_WORDS}},
            recipe=("sampling.max_response_tokens=52",),
            effort=1.5,
        ),
        Regime(
            "gym",
            "two data sets of reasoning-gym: sums of two digits, and sequences to continue",
            task={
                "kind": "reasoning_gym",
                "datasets": [
                    {
                        "name": "basic_arithmetic",
                        "config": {
                            "min_terms": 2,
                            "max_terms": 2,
                            "min_digits": 1,
                            "max_digits": 1,
                            "allow_parentheses": False,
                            "operators": ["+", "-"],
                        },
                    },
                    {
                        "name": "number_sequence",
                        "config": {
                            "min_terms": 4,
                            "max_terms": 4,
                            "min_value": -20,
                            "max_value": 20,
                            "max_complexity": 1,
                        },
                    },
                ],
                "train_size": 300,
                "template": "{question}>",
                "answer_pattern": "first_line",
            },
            warmup={
                "A": {"steps": 900, "strong_share": 0.6, "weak_share": 0.15},
                "B": {"steps": 900, "strong_share": 0.6, "weak_share": 0.15},
            },
            recipe=("sampling.max_response_tokens=8", "verification.workers=1"),
        ),
        *(
            Regime(
                f"draw-{seed}", f"the hidden programs of draw {seed}, known to nobody before", {"program_seed": seed}
            )
            for seed in (1, 3, 5)
        ),
        Regime(
            "gap",
            "model A knows its families far better than model B does its own",
            warmup={"A": {"strong_share": 0.7}, "B": {"strong_share": 0.2, "steps": 450}},
        ),
        Regime(
            "gap-mild",
            "model A knows its families better than model B does its own",
            warmup={"A": {"strong_share": 0.55, "steps": 700}, "B": {"strong_share": 0.25, "steps": 700}},
        ),
        Regime(
            "gap-wide",
            "model A knows its families far better than model B, which hardly knows any",
            warmup={"A": {"strong_share": 0.8}, "B": {"strong_share": 0.08}},
        ),
        Regime(
            "gap-reversed",
            "model B knows its families far better than model A does its own",
            warmup={"A": {"strong_share": 0.2, "steps": 400}, "B": {"strong_share": 0.7}},
        ),
        Regime(
            "rare",
            "each model has hardly ever seen one operation that half of the other's families need: necessary tokens "
            "far below tau",
            warmup={"A": {"rare": "F"}, "B": {"rare": "A"}},
        ),
        Regime(
            "mixed",
            "lists of 9 digits, other programs, model C with another separator, 5 % of wrong lists count as right",
            task={"length": 9, "program_seed": 4, "false_positives": 0.05},
            warmup={"A": {"steps": 650}, "C": {"separator": " - ", "steps": 800}},
            recipe=("sampling.max_response_tokens=40",),
            models=("A", "C"),
            held_out=True,
        ),
        Regime(
            "one-sided",
            "model B is strong in every family, model C in two of twelve",
            warmup={"B": {"strong_period": 1, "strong_offset": 0}, "C": {"strong_period": 6, "steps": 800}},
            models=("B", "C"),
            held_out=True,
        ),
        Regime(
            "transfer",
            "as base, in 40 steps: proxies explore, targets learn from them",
            steps=40,
            checkpoints=4,
        ),
    )
}

# The three pairs of the base regime differ in architecture, tokenizer and size. How much two models complement each
# other differs too: A and B are strong in disjoint families, C shares two of its four with either.
PAIRS: dict[str, Pair] = {
    pair.name: pair
    for pair in (
        Pair(("A", "B")),
        Pair(("A", "C")),
        Pair(("B", "C")),
        *(Pair(regime.models, name) for name, regime in REGIMES.items() if name not in ("base", "transfer")),
    )
}

TRANSFERS: dict[str, Transfer] = {
    transfer.name: transfer
    for transfer in (
        Transfer((), "S", "the smallest model by itself"),
        Transfer((), "M", "the middle model by itself"),
        Transfer((), "P", "a proxy of other strong families by itself"),
        Transfer(("M",), "A", "onto a larger model of the same family"),
        Transfer(("S",), "A", "onto the same target from a weaker proxy"),
        Transfer(("M",), "A", "onto a target that already surpasses the proxy", trained=True),
        Transfer(("M", "S"), "A", "what the proxy taught a smaller model, onto the target"),
        Transfer(("P",), "A", "from a proxy that is strong where the target is weak"),
        Transfer(("M",), "B", "onto a model of another architecture and tokenizer"),
    )
}
