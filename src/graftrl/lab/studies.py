"""The laboratory's studies, as data: which methods on which pairs, and what to make of the runs.

A run belongs to no study: several tables read the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BASELINE = "grpo"
SEEDS = 5


@dataclass(frozen=True)
class LabMethod:
    """How a method is trained in the laboratory.

    trains: "pair": one run trains both models. "alone": one run each, so that all pairs with a model share its run.
        "stored": one run each, with the rollout log of the peer's own run of the baseline with the same seed.
        "transfer": the target of a `Transfer` reads what its proxy's run with the same seed left.
    overrides: of the recipe (`key=value`), the method among them.
    scorers: of a transfer, which model each scorer is: the proxy "before" or "after" its run, or a model's name.
    quarters: of the proxy's run, after which "after" is.
    log: a transfer's name for the proxy as a stored peer, where the rollout log of its run is read too.
    steps: instead of the regime's.
    """

    name: str
    trains: Literal["pair", "alone", "stored", "transfer"]
    overrides: tuple[str, ...]
    scorers: tuple[tuple[str, str], ...] = ()
    quarters: int = 4
    log: str | None = None
    steps: int | None = None


# HACPO is published with minibatches of twice the baseline's prompts: own and peer rows are cut apart, so that a step
# has as many optimizer steps as the baseline's.
_SPECIAL = (
    LabMethod("grpo", "alone", ("method=grpo",)),
    LabMethod("grpo-n16", "alone", ("method=grpo", "training.group_size=16")),
    LabMethod("grpo-n32", "alone", ("method=grpo", "training.group_size=32")),
    LabMethod("dapo", "alone", ("method=dapo",)),
    LabMethod("gapo", "alone", ("method=gapo",)),
    LabMethod("replay", "alone", ("method=replay",)),
    # No prompt of the laboratory comes twice: the prompts of one family share the length of their prefix.
    LabMethod("adaprefix", "alone", ("method=adaprefix", "method.steer_by=family")),
    # 16 responses per prompt, two by each of eight members. A step moves a weight by some eta / (sigma sqrt(8)) = 5e-4,
    # the baseline's four AdamW steps by up to about 1.2e-3.
    LabMethod(
        "es",
        "alone",
        ("method=es", "method.population=8", "method.sigma=0.005", "method.eta=7e-6", "training.group_size=2"),
    ),
    LabMethod("hacpo", "pair", ("method=hacpo", "training.minibatch_prompts=16")),
    LabMethod("graft-hacpo-update", "pair", ("method=graft-hacpo-update", "training.minibatch_prompts=16")),
)
_TEACHER = (("teacher", "after"),)
_CHANGE = (("expert", "after"), ("base", "before"))
# As many optimizer steps as the baseline has, and the exact signal where the vocabulary is shared.
_FULL = ("method.estimator=full", "method.single_minibatch=false")
_SPANS = ("method.single_minibatch=false",)
TRANSFER_STEPS = 30
CALIBRATIONS = (0.5, 0.7, 1.0, 1.4, 2.0)  # lambda, evenly spaced in its logarithm
EXPLORED = (1, 2)  # quarters of the proxy's run, besides the whole


def calibrated(value: float) -> str:
    """The name of P-OPD with this lambda."""
    return "p_opd" if value == 1 else f"p_opd-lambda-{value:g}"


def explored(quarters: int) -> str:
    """The name of P-OPD with the expert after so many quarters of the proxy's run."""
    return "p_opd" if quarters == 4 else f"p_opd-quarter-{quarters}"


def _transfer(name: str, scorers: tuple[tuple[str, str], ...], *overrides: str, quarters: int = 4) -> LabMethod:
    return LabMethod(name, "transfer", overrides, scorers, quarters, steps=TRANSFER_STEPS)


_TRANSFERS = (
    *(_transfer(name, _TEACHER, f"method={name}", *_FULL) for name in ("opd", "opd_ft", "opd_urm", "ra_opd")),
    # Reinforcement learning with a teacher's help, so as long as the baseline.
    LabMethod("rstg", "transfer", ("method=rstg", "method.estimator=full"), _TEACHER, log="teacher"),
    # What scale instils: a larger against a smaller model, neither of them trained.
    _transfer("w2s_opd", (("positive", "M"), ("negative", "S")), "method=w2s_opd", *_FULL),
    _transfer("opd-spans", _TEACHER, "method=opd", *_SPANS),
    _transfer("p_opd-spans", _CHANGE, "method=p_opd", *_SPANS),
    *(
        _transfer(calibrated(value), _CHANGE, "method=p_opd", *_FULL, f"method.calibration={value}")
        for value in CALIBRATIONS
    ),
    *(_transfer(explored(quarters), _CHANGE, "method=p_opd", *_FULL, quarters=quarters) for quarters in EXPLORED),
)
LAB_METHODS: dict[str, LabMethod] = {method.name: method for method in (*_SPECIAL, *_TRANSFERS)}


def lab_method(name: str) -> LabMethod:
    """A method or preset that is not in `LAB_METHODS` trains both models of a pair, with its default options. With
    `-stored` behind its name it trains each with the peer's log."""
    if name.endswith("-stored"):
        return LabMethod(name, "stored", lab_method(name.removesuffix("-stored")).overrides)
    return LAB_METHODS.get(name) or LabMethod(name, "pair", (f"method={name}",))


@dataclass(frozen=True)
class Grid:
    """Methods on a transfer, with seeds 0, 1, ... up to `seeds`."""

    transfer: str
    methods: tuple[str, ...]
    seeds: int = SEEDS


@dataclass(frozen=True)
class Study:
    """What one command trains and writes.

    pairs, methods: all methods on all pairs; of a study of transfers, what its grids name.
    grids: what a study of transfers trains, the most important first; they may overlap.
    seeds: 0, 1, ... of every method.
    measured: scores are those of several responses after the last step (`graftrl.lab.measure`), with pass@8, entropy
        and forgetting; raw numbers go to NAME.csv too.
    held_out: its pairs wait for `--held-out`; until then no method but the baseline is trained on them.
    includes: studies that are trained one after the other and make one page; this one has no pairs of its own, and its
        methods and parts are about all of theirs. A held-out one is left out until `--held-out`.
    tuned: methods that are one method with several settings: the last reference is compared with the best of them.
    followed: single families (pair, family, model, methods) whose programs the page tells.
    references: methods that all others are compared with, paired by seed.
    parts: of the results page, in order; names of `graftrl.lab.pages.PARTS`.
    labels: what the page calls a method, where its name does not say enough.
    """

    name: str
    title: str
    question: str
    pairs: tuple[str, ...]
    methods: tuple[str, ...]
    references: tuple[str, ...] = (BASELINE,)
    parts: tuple[str, ...] = ("verdicts", "scores", "curves", "paper")
    labels: tuple[tuple[str, str], ...] = ()
    grids: tuple[Grid, ...] = ()
    seeds: int = SEEDS
    measured: bool = False
    held_out: bool = False
    includes: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()
    followed: tuple[tuple[str, str, str, tuple[str, ...]], ...] = ()

    def label(self, method: str) -> str:
        return dict(self.labels).get(method, method)


_MEASURED = ("regimes", "families", "measures", "exchange")
_TELLING = ("A-B", "A-B-style")  # clean demonstrations, and a peer with another style
_MAIN = ("grpo", "opd", "p_opd")
_VARIANTS = ("opd_ft", "opd_urm", "ra_opd", "rstg", "w2s_opd")
_SWEEP = tuple(calibrated(value) for value in CALIBRATIONS if value != 1)
_BUDGETS = tuple(explored(quarters) for quarters in EXPLORED)
_SPANNED = ("opd-spans", "p_opd-spans")
_ALL_PAIRS = ("A-B", "A-C", "B-C")
_FIRST_PAIR = ("A-B",)
_SCION_PAIRS = (
    "A-B",
    "A-B-style",
    "A-B-lenient",
    "A-B-programs",
    "A-B-short",
    "A-B-long",
    "A-B-stored",
    "A-B-C-three",
    "A-B-weak",
    "A-B-misled",
    "P-D-unequal",
    "A-B-worded",
    "A-B-lengthy",
    "A-B-gym",
)
_SGT = ("sgt-0.03", "sgt", "sgt-0.3", "sgt-1")

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "main",
            "Main comparison",
            "Does GRAFT beat GRPO with the same number of rollouts, GRPO with more of them, and other ways to learn "
            "from a peer?",
            _ALL_PAIRS,
            ("grpo", "grpo-n16", "grpo-n32", "hacpo", "sgt", "graft"),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "curves", "cost plot", "complementarity", "exchange", "paper"),
        ),
        Study(
            "stored",
            "Stored peers",
            "Does GRAFT need the peer beside it, or does the log of the peer's own GRPO run do?",
            _ALL_PAIRS,
            ("grpo", "graft", "graft-stored"),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "curves", "costs", "exchange", "paper"),
        ),
        Study(
            "ablation",
            "Ablation of GRAFT's components",
            "Which of GRAFT's components does it need?",
            _FIRST_PAIR,
            (
                "grpo",
                "graft",
                "graft-no-gate",
                "graft-no-floor",
                "graft-unbalanced",
                "graft-sequence-ratio",
                "graft-random-prompts",
                "graft-random-admission",
                "graft-peer-first",
                "graft-peer-uniform",
            ),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "curves", "exchange", "paper"),
        ),
        Study(
            "designs",
            "Alternative designs",
            "Would another way to use the peer's groups do as well?",
            _FIRST_PAIR,
            (
                "grpo",
                "graft",
                "graft-pooled",
                "graft-success-only",
                "graft-success-only-no-floor",
                "graft-hacpo-update",
                "graft-sgt-update",
                "graft-luffy-update",
            ),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "curves", "exchange", "paper"),
        ),
        Study(
            "delta",
            "The gate's threshold",
            "How does the result depend on the threshold that a response's compatibility must exceed?",
            _FIRST_PAIR,
            ("grpo", "graft-no-floor", "graft-delta-0.7", "graft", "graft-delta-0.9"),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "curves", "exchange", "paper"),
            labels=(("graft-no-floor", "graft, δ = 0 (graft-no-floor)"), ("graft", "graft, δ = 0.8")),
        ),
        Study(
            "position",
            "Where the peer's minibatches stand",
            "Does it matter whether the peer's minibatches come first, anywhere or last in a step?",
            _FIRST_PAIR,
            ("grpo", "graft-peer-first", "graft-peer-uniform", "graft"),
            references=("grpo", "graft"),
            parts=("verdicts", "scores", "clipping", "curves", "paper"),
            labels=(
                ("graft-peer-first", "graft, peer first"),
                ("graft-peer-uniform", "graft, peer anywhere"),
                ("graft", "graft, peer last"),
            ),
        ),
        Study(
            "cost",
            "Cost",
            "What does each method cost for what it reaches?",
            _FIRST_PAIR,
            ("grpo", "grpo-n16", "grpo-n32", "dapo", "hacpo", "sgt", "graft", "graft-stored"),
            references=("grpo", "graft"),
            parts=("verdicts", "costs", "cost plot", "scores", "paper"),
        ),
        Study(
            "stability",
            "Stability of training",
            "How far do runs of different seeds lie apart, and does any of them collapse?",
            _ALL_PAIRS,
            ("grpo", "hacpo", "sgt", "graft"),
            parts=("stability", "entropy plot", "scores", "paper"),
        ),
        Study(
            "others",
            "Other methods",
            "What do the methods that need no peer, and other ways to learn from one, add to GRPO here?",
            _FIRST_PAIR,
            ("grpo", "dapo", "gapo", "replay", "adaprefix", "es", "luffy", "scion", "graft"),
            parts=("verdicts", "scores", "curves", "costs"),
        ),
        Study(
            "regimes",
            "Other regimes",
            "Does the result hold with shorter and longer responses, other programs, another style of one model, an "
            "imperfect verifier, models of unequal size, and a much weaker peer?",
            (
                "A-B",
                "A-B-short",
                "A-B-long",
                "A-B-lengthy",
                "A-B-programs",
                "A-B-style",
                "A-B-lenient",
                "P-D-unequal",
                "A-B-weak",
            ),
            ("grpo", "graft", "sgt", "scion"),
            parts=("verdicts", "scores", "exchange", "curves"),
        ),
        Study(
            "scion",
            "SCION",
            "Does one damped and weighted success of a better peer teach more than what SGT and GRAFT exchange, in "
            "which regimes, and through which of its parts?",
            (),
            ("grpo", "grpo-n32", "hacpo", "graft", "sgt"),
            references=("scion",),
            parts=("rivals", "followed"),
            tuned=_SGT,
            measured=True,
            followed=(
                ("A-C-mixed", "j", "A", ("grpo", "sgt", "scion")),
                ("A-C-mixed", "j", "C", ("scion",)),
                ("A-B-gap-wide", "f", "A", ("sgt", "scion")),
                ("A-B-gap-wide", "f", "B", ("scion",)),
                ("A-B-draw-5", "l", "A", ("sgt", "scion")),
                ("A-B-draw-5", "l", "B", ("scion",)),
            ),
            includes=(
                "scion-regimes",
                "scion-rivals",
                "scion-trials",
                "scion-controls",
                "scion-ablation",
                "scion-sensitivity",
                "scion-held-out",
            ),
        ),
        Study(
            "scion-regimes",
            "SCION in every regime",
            "Where does SCION beat GRPO, GRAFT and SGT, and where does it not?",
            _SCION_PAIRS,
            ("grpo", "graft", "sgt", "scion"),
            references=("grpo", "sgt"),
            parts=_MEASURED,
            measured=True,
        ),
        Study(
            "scion-rivals",
            "SCION and its rivals",
            "Would more rollouts, HACPO, or SGT with a coefficient chosen for the regime do as well?",
            _SCION_PAIRS,
            ("grpo", "grpo-n32", "hacpo", *_SGT, "scion"),
            references=("grpo", "scion"),
            parts=("tuned", *_MEASURED),
            measured=True,
            tuned=_SGT,
        ),
        Study(
            "scion-trials",
            "Attempts to break SCION",
            "Is SCION ever reliably below SGT: with other programs, gaps in skill between the models, or necessary "
            "tokens that the receiver hardly ever says?",
            (
                "A-B-draw-1",
                "A-B-draw-3",
                "A-B-draw-5",
                "A-B-gap",
                "A-B-gap-mild",
                "A-B-gap-wide",
                "A-B-gap-reversed",
                "A-B-rare",
            ),
            ("grpo", "grpo-n32", "hacpo", "graft", *_SGT, "scion"),
            references=("grpo", "scion"),
            parts=("tuned", *_MEASURED),
            measured=True,
            tuned=_SGT,
        ),
        Study(
            "scion-controls",
            "Controls of SCION",
            "Would imitation of success as such do as well, or SGT that pulls as hard as SCION?",
            (*_TELLING, "A-B-lenient"),
            ("grpo", "sgt", "sgt-matched", "scion-self", "scion-self-first", "scion"),
            references=("grpo", "scion"),
            parts=_MEASURED,
            seeds=3,
            measured=True,
        ),
        Study(
            "scion-ablation",
            "Ablation of SCION's parts",
            "Which of SCION's parts does it need?",
            (*_TELLING, "A-B-misled", "A-B-draw-5"),  # the last two: where SCION loses to SGT
            (
                "grpo",
                "scion",
                "scion-rated",
                "scion-headroom",
                "scion-no-advantage",
                "scion-no-damping",
                "scion-all-fail",
                "scion-mean-transferred",
                "scion-mean-tokens",
            ),
            references=("grpo", "scion"),
            parts=_MEASURED,
            seeds=3,
            measured=True,
        ),
        Study(
            "scion-sensitivity",
            "SCION's two constants",
            "How does the result depend on tau and lambda, over two decades?",
            _TELLING,
            (
                "grpo",
                "scion-tau-0.01",
                "scion-tau-0.03",
                "scion",
                "scion-tau-0.3",
                "scion-tau-1",
                "scion-lambda-0.1",
                "scion-lambda-0.3",
                "scion-lambda-3",
                "scion-lambda-10",
            ),
            references=("grpo", "scion"),
            parts=_MEASURED,
            labels=(("scion", "scion (tau 0.1, lambda 1)"),),
            seeds=3,
            measured=True,
        ),
        Study(
            "scion-held-out",
            "SCION in regimes that it was not made in",
            "Does the frozen rule hold where nobody tried it before?",
            ("A-C-mixed", "B-C-one-sided"),
            ("grpo", "grpo-n32", "hacpo", "graft", *_SGT, "scion"),
            references=("grpo", "scion"),
            parts=("tuned", *_MEASURED),
            measured=True,
            held_out=True,
            tuned=_SGT,
        ),
        Study(
            "distillation",
            "Distillation from a proxy",
            "Does a target gain more from what reinforcement learning changed in a proxy (P-OPD) than from the proxy "
            "itself (OPD), and when is either worth its cost?",
            ("M-A", "S-A", "M-A_trained", "M-S-A", "M-B", "P-A", "M", "S", "P"),
            (*_MAIN, *_SWEEP, *_BUDGETS, *_VARIANTS, *_SPANNED),
            references=("grpo", "opd"),
            parts=("findings", "scores", "calibration", "budget", "reaching", "transfer curves", "setup"),
            grids=(
                Grid("M", ("grpo",), seeds=3),
                Grid("M-A", _MAIN, seeds=3),
                Grid("M-A_trained", ("opd", "p_opd"), seeds=3),
                Grid("S", ("grpo",), seeds=3),
                Grid("S-A", _MAIN, seeds=3),
                Grid("M-A", _SWEEP, seeds=3),
                Grid("M-A", _BUDGETS, seeds=3),
                Grid("M-S-A", ("grpo", "p_opd"), seeds=3),
                Grid("M-A", _VARIANTS, seeds=3),
                Grid("M-B", ("grpo", *_SPANNED), seeds=3),
                Grid("M", ("grpo",)),
                Grid("M-A", _MAIN),
                Grid("S-A", _SWEEP, seeds=3),
                Grid("P", ("grpo",), seeds=3),
                Grid("P-A", _MAIN, seeds=3),
            ),
        ),
    )
}
