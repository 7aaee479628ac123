from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from scorer import Scorer

from graftrl.errors import DataError
from graftrl.methods import build_method
from graftrl.methods.adaprefix import help_left
from graftrl.methods.extensions import PreparesPrompts, PromptContext
from graftrl.rollout import Prompt

SOLUTION = "A:1,2,3;E:3,6,9"


def prompt(prompt_id="q0", **metadata):
    fields = {"solution": SOLUTION, **metadata}
    return Prompt(prompt_id, ({"role": "user", "content": "a1,2,3>"},), "x", "t", fields)


@pytest.fixture
def prepare(codecs):
    def run(*prompts, progress=0.0, memory=None, limit=40, model="A", **options):
        method = build_method({"name": "adaprefix", **options})
        assert isinstance(method, PreparesPrompts)
        return method.prepare(model, prompts, PromptContext(progress, codecs[model], limit, memory or {}))

    return run


@pytest.mark.parametrize("model", ["A", "B"])
def test_the_prefix_is_the_given_share_of_the_solutions_tokens_and_begins_the_answer(prepare, codecs, model):
    ids = codecs[model].tokenizer.encode(SOLUTION, add_special_tokens=False)
    for share in (0.25, 0.5, 1.0):
        (begun,) = prepare(prompt(), initial=share, model=model)
        kept = round(share * len(ids))
        assert codecs[model].tokenizer.encode(begun.prefix, add_special_tokens=False) == ids[:kept]
        assert SOLUTION.startswith(begun.prefix) and begun.id == "q0" and begun.question == prompt().messages
        whole = codecs[model].prompt_token_ids(begun).tolist()
        assert whole == [*codecs[model].prompt_token_ids(prompt()).tolist(), *ids[:kept]]
    assert prepare(prompt(), initial=0.0) == [prompt()]


def test_own_rows_hold_the_prefix_in_the_prompt_so_it_stands_in_no_loss(prepare, codecs, context, make_group):
    (begun,) = prepare(prompt())
    group = replace(make_group("A", "q0", [1, 0]), prompt=begun)
    (row, _) = build_method("adaprefix").exchange({"A": [group]}, context(Scorer(0.0), 2)).rows["A"]
    assert row.prompt_token_ids.tolist() == codecs["A"].prompt_token_ids(begun).tolist()
    assert row.response_token_ids.tolist() == group.responses[0].token_ids.tolist() and row.loss_mask.all()


def steer(context, make_group, memory, rates, **options):
    """Memory after a step in which A's groups, by prompt, had these numbers of successes of four."""
    groups = [
        replace(make_group("A", q, [1] * k + [0] * (4 - k)), prompt=prompt(q, family=q[0])) for q, k in rates.items()
    ]
    step = context(Scorer(0.0), 4, memory=memory)
    return build_method({"name": "adaprefix", **options}).exchange({"A": groups}, step).memory


def test_lengths_are_steered_towards_half_successes_by_a_moving_average(context, make_group):
    options = {"initial": 0.4, "eta": 0.2, "smoothing": 0.25}
    memory = steer(context, make_group, {}, {"q0": 0, "q1": 4}, **options)
    assert memory["A"]["q0"] == pytest.approx([0.4 + 0.2 * 0.5, 0.0])  # the first rate starts the average
    assert memory["A"]["q1"] == pytest.approx([0.4 - 0.2 * 0.5, 1.0])
    memory = steer(context, make_group, memory, {"q0": 4}, **options)
    assert memory["A"]["q0"] == pytest.approx([0.5 + 0.2 * (0.5 - 0.25), 0.25])
    assert memory["A"]["q1"] == pytest.approx([0.3, 1.0])  # not asked in this step
    for _ in range(30):
        memory = steer(context, make_group, memory, {"q0": 0, "q1": 4}, **options)
    assert memory["A"]["q0"][0] == 1.0 and memory["A"]["q1"][0] == 0.0


def test_prompts_can_share_a_controller(prepare, context, make_group, codecs):
    memory = steer(context, make_group, {}, {"a1": 0, "a2": 2, "b1": 4}, steer_by="family", eta=0.4)
    assert memory["A"]["a"] == pytest.approx([0.5 + 0.4 * 0.25, 0.25]) and set(memory["A"]) == {"a", "b"}
    new = prompt("a9", family="a")
    (begun,) = prepare(new, memory=memory, steer_by="family")
    tokens = len(codecs["A"].tokenizer.encode(SOLUTION, add_special_tokens=False))
    assert len(codecs["A"].tokenizer.encode(begun.prefix, add_special_tokens=False)) == round(0.6 * tokens)


def test_help_is_withdrawn_over_the_run(prepare):
    assert [help_left(p, 0.5, 0.9) for p in (0.0, 0.5, 0.7, 0.9, 0.99)] == pytest.approx([1, 1, 0.5, 0, 0])
    assert help_left(0.3, 0.3, 0.3) == 0.0
    lengths = [len(prepare(prompt(), progress=p, initial=1.0)[0].prefix) for p in (0.0, 0.6, 0.8, 0.95)]
    assert lengths[0] == len(SOLUTION) and lengths == sorted(lengths, reverse=True) and lengths[-1] == 0
    assert len(set(lengths)) == 4


def test_a_prefix_never_makes_a_prompt_too_long(prepare, codecs):
    plain = len(codecs["A"].prompt_token_ids(prompt()))
    (begun,) = prepare(prompt(), initial=1.0, limit=plain + 3)
    assert len(codecs["A"].prompt_token_ids(begun)) == plain + 3
    assert prepare(prompt(), initial=1.0, limit=plain) == [prompt()]


def test_a_prompt_without_a_solution_is_named_with_what_to_set(prepare):
    bare = Prompt("q7", ({"role": "user", "content": "a1>"},), "x", "t", {"answer": "x"})
    with pytest.raises(DataError, match=r"'q7' has no 'solution' .*answer.*solution_field"):
        prepare(bare)
    (begun,) = prepare(replace(bare, metadata={"steps": SOLUTION}), solution_field="steps")
    assert begun.prefix


def test_the_share_that_was_given_is_logged(prepare, context, make_group):
    (begun,) = prepare(prompt(), initial=1.0)
    groups = [replace(make_group("A", "q0", [1, 0]), prompt=p) for p in (begun, prompt())]
    exchange = build_method("adaprefix").exchange({"A": groups}, context(Scorer(0.0), 2))
    assert exchange.diagnostics["A"]["prefix_share"] == pytest.approx(0.5)


def test_settings_that_cannot_steer_are_refused():
    with pytest.raises(ValidationError, match="withdraw_to"):
        build_method({"name": "adaprefix", "withdraw_from": 0.8, "withdraw_to": 0.2})
    with pytest.raises(ValidationError, match="dynamic_sampling"):
        build_method({"name": "adaprefix", "dynamic_sampling": True})


def test_a_cut_inside_a_character_gives_no_replacement_character(codecs):
    class Bytes:
        """A tokenizer of bytes."""

        def encode(self, text, add_special_tokens):
            return list(text.encode())

        def decode(self, ids, **options):
            return bytes(ids).decode(errors="replace")

    class ByteCodec:
        tokenizer = Bytes()

        def prompt_token_ids(self, prompt):
            return np.array(self.tokenizer.encode(prompt.text, add_special_tokens=False))

    method = build_method({"name": "adaprefix", "initial": 0.5})
    (begun,) = method.prepare(
        "A", [replace(prompt(), metadata={"solution": "aé"})], PromptContext(0, ByteCodec(), 99, {})
    )
    assert begun.prefix == "a"  # two of three bytes end within the é
