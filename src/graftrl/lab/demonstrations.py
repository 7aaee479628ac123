"""Demonstrations in bulk: drawn, executed and tokenised as arrays, since a warm-up step takes well under 0.1 s.

All demonstrations of a task have one shape: the same characters at the same positions but for digits and letters. Token
boundaries are therefore those of any one of them, and tokenising is a table look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftrl.errors import ModelError
from graftrl.lab.programs import (
    FAMILY_LETTERS,
    LETTERS,
    OPERATIONS,
    PROGRAMS,
    Digits,
    HiddenProgramsConfig,
    draw_programs,
    held_out,
    write_demonstration,
    write_prompt,
)

Characters = NDArray[np.uint8]  # ASCII codes
Phrasing = tuple[str, str]  # what stands before the first step, and between both
TokenIds = NDArray[np.int64]

_PAIRS = np.array([[LETTERS.index(letter) for letter in program] for program in PROGRAMS])  # [72, 2]


def _apply(operations: NDArray[np.int64], digits: Digits) -> Digits:
    """Row i of `digits` `[N, L]` under operation `operations[i]`, a position in `LETTERS`."""
    images = np.stack([operation(digits) for operation in OPERATIONS.values()])
    return images[operations, np.arange(len(digits))]


def _spell(digits: Digits) -> Characters:
    """`[N, L]` digits as `d,d,...,d`: `[N, 2L - 1]`."""
    spelt = np.full((len(digits), 2 * digits.shape[1] - 1), ord(","), dtype=np.uint8)
    spelt[:, ::2] = digits + ord("0")
    return spelt


def _constant(text: str, rows: int) -> Characters:
    return np.tile(np.frombuffer(text.encode("ascii"), dtype=np.uint8), (rows, 1))


def _letters(alphabet: str, positions: NDArray[np.int64]) -> Characters:
    return np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)[positions][:, None]


class Demonstrator:
    """Draws prompts with demonstrations, as characters.

    In strong families a share `strong_share` of demonstrations uses the family's program; all others use a program
    drawn uniformly from the 72 ordered pairs (without the rare letters, where there are such). Held-out prompts are
    never drawn.
    """

    def __init__(
        self,
        config: HiddenProgramsConfig,
        strong: NDArray[np.bool_],
        strong_share: float,
        separator: str,
        misled: Mapping[str, str] | None = None,
        slips: float = 0.0,
        rare: str = "",
        rare_share: float = 0.0,
    ) -> None:
        """strong: bool `[families]`. misled: families with a program that stands for their own. slips: share of
        demonstrations with one wrong digit in the first list; the second is right nevertheless. rare: letters that
        stand in a share `rare_share` of the demonstrations alone; families that need one are not strong."""
        self._config = config
        self._separator = separator
        self._slips = slips
        taught = {**draw_programs(config), **(misled or {})}
        self._own = np.array([[LETTERS.index(op) for op in program] for program in taught.values()])
        hard = [LETTERS.index(letter) for letter in rare]
        self._share = np.where(strong & ~np.isin(self._own, hard).any(1), strong_share, 0.0)
        has_rare = np.isin(_PAIRS, hard).any(1)
        self._common, self._rare = _PAIRS[~has_rare], _PAIRS[has_rare]
        self._rare_share = rare_share if rare else 0.0

    def draw(
        self, rows: int, generator: np.random.Generator, phrasing: Phrasing | None = None
    ) -> tuple[Characters, Characters]:
        """Prompts `[rows, P]` and responses without EOS `[rows, R]`, in characters.

        phrasing: what stands before the first step and between the steps; by default nothing, and the separator.
        """
        opening, joiner = phrasing or ("", self._separator)
        families = generator.integers(self._config.families, size=rows)
        digits = generator.integers(0, 10, (rows, self._config.length))
        while (again := held_out(families, digits)).any():
            digits[again] = generator.integers(0, 10, (int(again.sum()), self._config.length))
        right = generator.random(rows) < self._share[families]
        others = self._common[generator.integers(len(self._common), size=rows)]
        programs = np.where(right[:, None], self._own[families], others)
        if self._rare_share:
            shown = generator.random(rows) < self._rare_share
            programs[shown] = self._rare[generator.integers(len(self._rare), size=int(shown.sum()))]
        first = _apply(programs[:, 0], digits)
        second = _apply(programs[:, 1], first)
        if self._slips:
            slips = generator.random(rows) < self._slips
            place = generator.integers(self._config.length, size=rows)
            wrong = (first[np.arange(rows), place] + generator.integers(1, 10, rows)) % 10
            first[slips, place[slips]] = wrong[slips]
        prompts = [_letters(FAMILY_LETTERS, families), _spell(digits), _constant(">", rows)]
        responses = [
            _constant(opening, rows),
            _letters(LETTERS, programs[:, 0]),
            _constant(":", rows),
            _spell(first),
            _constant(joiner, rows),
            _letters(LETTERS, programs[:, 1]),
            _constant(":", rows),
            _spell(second),
        ]
        return np.concatenate(prompts, axis=1), np.concatenate(responses, axis=1)


@dataclass(frozen=True)
class TableTokenizer:
    """The tokens of texts that all have the shape of one example, equal to what the tokenizer gives one by one."""

    _first: NDArray[np.int64]  # [T], position of each token's first character
    _second: NDArray[np.int64]  # [T], position of its second character, or -1
    _table: TokenIds  # [128, 129], id by the codes of both characters; column 128: no second one

    @classmethod
    def of(cls, tokenizer: Any, example: str) -> TableTokenizer:
        """Raises ModelError if a token of the example has more than two characters."""
        spans = tokenizer(example, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if any(end - start not in (1, 2) for start, end in spans):
            raise ModelError(f"a table holds tokens of one or two characters; {example!r} has longer ones")
        table = np.full((128, 129), tokenizer.unk_token_id, dtype=np.int64)
        for token, index in tokenizer.get_vocab().items():
            if len(token) <= 2 and token.isascii():
                table[ord(token[0]), ord(token[1]) if len(token) == 2 else 128] = index
        first = np.array([start for start, _ in spans])
        second = np.array([start + 1 if end - start == 2 else -1 for start, end in spans])
        return cls(first, second, table)

    @property
    def length(self) -> int:
        """T, in tokens."""
        return len(self._first)

    def __call__(self, characters: Characters) -> TokenIds:
        """`[N, C]` characters as ids `[N, T]`."""
        second = np.where(self._second < 0, 128, characters[:, self._second])
        return self._table[characters[:, self._first], second]


def table_tokenizers(
    tokenizer: Any, config: HiddenProgramsConfig, separator: str, opening: str = ""
) -> tuple[TableTokenizer, TableTokenizer]:
    """For prompts and for responses of `config`."""
    digits = np.zeros(config.length, dtype=np.int64)
    return (
        TableTokenizer.of(tokenizer, write_prompt("a", digits)),
        TableTokenizer.of(tokenizer, write_demonstration(PROGRAMS[0], digits, separator, opening)),
    )
