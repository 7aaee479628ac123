"""The "hidden programs" task: lists of digits, and families that each stand for an unnamed pair of operations.

A prompt is a family letter and a list, `c3,1,4,1,5,9,2,6>`. Each family is a fixed program of two operations; nothing
in the prompt says which. A response names an operation, writes the list after it, and does so once more:
`A:6,2,9,5,1,4,1,3;E:8,6,7,5,3,2,3,9`. Only the last list is graded. Knowing a family is then a prior over programs,
which reinforcement learning sharpens, while executing a named program is a skill that models share from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from graftrl.errors import ConfigError
from graftrl.rollout import FinishReason, Prompt
from graftrl.seeds import derive_seed
from graftrl.settings import Settings
from graftrl.tasks.base import Grade, Task

Digits = NDArray[np.int64]  # [..., L], each in 0..9
Program = tuple[str, str]  # two operation letters, first applied first

SEPARATOR_CHARACTERS = ";|/&+-~ "
FAMILY_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASK_NAME = "hidden_programs"

_PROGRAMS, _TRAIN, _VALIDATION = range(3)  # streams of random numbers that must not meet


# --- Operations ------------------------------------------------------------------------------------------------------


def _swap_pairs(x: Digits) -> Digits:
    even = x.shape[-1] // 2 * 2
    swapped = x[..., :even].reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(*x.shape[:-1], even)
    return np.concatenate([swapped, x[..., even:]], axis=-1)


OPERATIONS: dict[str, Callable[[Digits], Digits]] = {
    "A": lambda x: x[..., ::-1],  # reverse
    "B": lambda x: 9 - x,  # complement
    "C": lambda x: np.maximum.accumulate(x, axis=-1),  # cumulative maximum
    "D": lambda x: np.roll(x, -1, axis=-1),  # rotate left by one
    "E": lambda x: 3 * x % 10,
    "F": _swap_pairs,  # positions (0, 1), (2, 3), ...; a last odd one stays
    "G": lambda x: np.minimum.accumulate(x, axis=-1),  # cumulative minimum
    "H": lambda x: (x + np.arange(x.shape[-1])) % 10,  # add the position, counted from 0
    "I": lambda x: (x + 3) % 10,
}
LETTERS = "".join(OPERATIONS)
PROGRAMS: tuple[Program, ...] = tuple((p, q) for p in LETTERS for q in LETTERS if p != q)  # 72 ordered pairs


def execute(program: Program, digits: Digits) -> tuple[Digits, Digits]:
    """The lists `[..., L]` after the first and after the second operation of `program`."""
    first = OPERATIONS[program[0]](digits)
    return first, OPERATIONS[program[1]](first)


def write_list(digits: Digits) -> str:
    """`[L]` digits as `d,d,...,d`."""
    return ",".join(map(str, digits.tolist()))


def write_prompt(family: str, digits: Digits) -> str:
    """The prompt of one family letter and digits `[L]`."""
    return f"{family}{write_list(digits)}>"


def write_demonstration(program: Program, digits: Digits, separator: str = ";", opening: str = "") -> str:
    """The response that names `program` and executes it on digits `[L]`, without EOS.

    For a family's right answer pass `draw_programs(config)[family]`.
    """
    first, second = execute(program, digits)
    return f"{opening}{program[0]}:{write_list(first)}{separator}{program[1]}:{write_list(second)}"


# --- Settings --------------------------------------------------------------------------------------------------------


class HiddenProgramsConfig(Settings):
    """Settings of the task.

    families: how many, lettered from `a`.
    length: L, digits in a list. With 4 a response has about 13 tokens and few successes pass GRAFT's gate.
    program_seed: draws the families' programs. seed: draws the prompts.
    train_size, validation_size: prompts; the second is a multiple of `families`, with equal counts of each.
    separator: stands between the two steps of a demonstration; the verifier does not look at it.
    false_positives: share of wrong lists that the verifier counts as right, always the same ones, on training prompts.
        Validation is graded by the exact rule.
    """

    kind: Literal["hidden_programs"] = "hidden_programs"
    families: int = Field(default=12, ge=1, le=len(FAMILY_LETTERS))
    length: int = Field(default=8, ge=3, le=16)
    program_seed: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    train_size: int = Field(default=100_000, ge=1)
    validation_size: int = Field(default=720, ge=1)
    separator: str = Field(default=";", min_length=1, max_length=4)
    false_positives: float = Field(default=0.0, ge=0, lt=1)

    @property
    def family_letters(self) -> str:
        return FAMILY_LETTERS[: self.families]

    @field_validator("separator")
    @classmethod
    def _known_separator(cls, value: str) -> str:
        if strange := set(value) - set(SEPARATOR_CHARACTERS):
            raise ValueError(f"separator holds {sorted(strange)}; choose among {SEPARATOR_CHARACTERS!r}")
        return value

    @model_validator(mode="after")
    def _validation_fits(self) -> HiddenProgramsConfig:
        if self.validation_size % self.families:
            raise ValueError(f"validation_size {self.validation_size} is no multiple of {self.families} families")
        # Half of the held-out lists at most: the draw without repetition below then ends soon.
        if self.validation_size // self.families > 10**self.length // (2 * _HELD_OUT_ONE_IN):
            raise ValueError(f"validation_size {self.validation_size} is too large for lists of {self.length} digits")
        return self


# --- Programs --------------------------------------------------------------------------------------------------------


def draw_programs(config: HiddenProgramsConfig) -> dict[str, Program]:
    """`{family: program}`, drawn without replacement from `program_seed`.

    Two programs count as one if they act alike on random lists of this length (operations may commute: `BD` and `DB`).
    Left out: programs that act as the identity or as a single operation, and those whose output is always a constant
    list (`CG`, `GC`).

    Raises ConfigError if fewer programs remain than families (short lists make operations coincide).
    """
    probes = np.random.default_rng(0).integers(0, 10, (64, config.length))
    seen = {probes.tobytes()} | {np.ascontiguousarray(operation(probes)).tobytes() for operation in OPERATIONS.values()}
    drawn: list[Program] = []
    for index in np.random.default_rng([config.program_seed, _PROGRAMS]).permutation(len(PROGRAMS)):
        output = np.ascontiguousarray(execute(PROGRAMS[index], probes)[1])
        if output.tobytes() in seen or (output == output[:, :1]).all():
            continue
        seen.add(output.tobytes())
        drawn.append(PROGRAMS[index])
    if len(drawn) < config.families:
        raise ConfigError(
            f"only {len(drawn)} programs differ on lists of {config.length} digits; ask for fewer families"
        )
    return dict(zip(config.family_letters, drawn, strict=False))


# --- Prompts ---------------------------------------------------------------------------------------------------------

_HELD_OUT_ONE_IN = 16


def held_out(families: NDArray[np.int64], digits: Digits) -> NDArray[np.bool_]:
    """Which prompts belong to validation: bool `[N]` for family indices `[N]` and digits `[N, L]`.

    A hash of the prompt decides, for one in 16. Training prompts and warm-up demonstrations keep to the other side,
    so that the two are disjoint by construction whatever their seeds and sizes.
    """
    places = np.uint64(10) ** np.arange(digits.shape[-1], dtype=np.uint64)
    key = (digits.astype(np.uint64) * places).sum(-1, dtype=np.uint64)
    key += families.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    chosen: NDArray[np.bool_] = (key ^ (key >> np.uint64(31))) % np.uint64(_HELD_OUT_ONE_IN) == 0
    return chosen


def _make_prompt(identifier: str, family: str, digits: Digits, program: Program, **metadata: bool) -> Prompt:
    return Prompt(
        id=identifier,
        messages=({"role": "user", "content": write_prompt(family, digits)},),
        reference=write_list(execute(program, digits)[1]),
        task=TASK_NAME,
        metadata={"family": family, "solution": write_demonstration(program, digits), **metadata},
    )


class TrainPrompts(Sequence[Prompt]):
    """A lazy sequence: item i is a function of (seed, i) alone, with a family drawn uniformly. Picklable."""

    def __init__(self, config: HiddenProgramsConfig) -> None:
        self._config = config
        self._programs = draw_programs(config)

    def __len__(self) -> int:
        return self._config.train_size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Raises IndexError beyond `train_size`."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        generator = np.random.default_rng([self._config.seed, _TRAIN, i])
        family = generator.integers(self._config.families, size=1)
        digits = generator.integers(0, 10, (1, self._config.length))
        while held_out(family, digits)[0]:
            digits = generator.integers(0, 10, (1, self._config.length))
        letter = FAMILY_LETTERS[int(family[0])]
        lenient = {"lenient": True} if self._config.false_positives > 0 else {}
        return _make_prompt(f"train-{i:06d}", letter, digits[0], self._programs[letter], **lenient)


def _draw_validation(config: HiddenProgramsConfig) -> tuple[Prompt, ...]:
    """All validation prompts, without repetition, families in turn (a, b, c, ..., a, b, ...)."""
    programs = draw_programs(config)
    generator = np.random.default_rng([config.seed, _VALIDATION])
    per_family = config.validation_size // config.families
    lists: list[list[Digits]] = []
    for family in range(config.families):
        distinct: dict[bytes, Digits] = {}
        while len(distinct) < per_family:
            digits = generator.integers(0, 10, (4 * per_family + 64, config.length))
            for row in digits[held_out(np.full(len(digits), family), digits)]:
                distinct.setdefault(row.tobytes(), row)
        lists.append(list(distinct.values())[:per_family])
    return tuple(
        _make_prompt(f"validation-{i:06d}", letter, lists[i % config.families][i // config.families], programs[letter])
        for i in range(config.validation_size)
        for letter in [FAMILY_LETTERS[i % config.families]]
    )


# --- Verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HiddenProgramsVerifier:
    """1 iff the response ended by EOS and the list after its last `:` is the reference; the letters do not matter.

    false_positives: share of (prompt, wrong list) pairs that get 1 too, where the prompt's metadata say `lenient`. A
    function of the pair, so that grading again gives the same rewards.
    """

    false_positives: float = 0.0

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Grade:
        if finish_reason != "stop":
            return Grade(0.0, "cut at the token limit")
        _, colon, answer = response.rpartition(":")
        if not colon:
            return Grade(0.0, "no list")
        if answer == prompt.reference:
            return Grade(1.0, "right list")
        if prompt.metadata.get("lenient") and derive_seed(prompt.id, answer) < self.false_positives * 2**63:
            return Grade(1.0, "wrong list, counted right")
        return Grade(0.0, "wrong list")


def build_hidden_programs(config: HiddenProgramsConfig) -> Task:
    """The task of `config`; raises ConfigError if its lists are too short for that many families."""
    return Task(
        name=TASK_NAME,
        train=TrainPrompts(config),
        validation=_draw_validation(config),
        verifier=HiddenProgramsVerifier(config.false_positives),
        in_process=True,
    )
