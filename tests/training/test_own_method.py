"""Methods whose rows and objective do not fit together are refused before anything is trained on them."""

import pytest

from graftrl.errors import ConfigError
from graftrl.methods.grpo import GRPO
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


class OtherKind(GRPO):
    def exchange(self, groups, context):
        exchange = super().exchange(groups, context)
        exchange.rows["A"][0].kind = "imitate"
        return exchange


class WithoutOldLogprobs(GRPO):
    def exchange(self, groups, context):
        exchange = super().exchange(groups, context)
        exchange.rows["B"][0].old_logprobs = None
        return exchange


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OtherKind", "a row of kind 'imitate', which no term of its objective takes; there are terms for own"),
        ("WithoutOldLogprobs", "a row of kind 'own' without old_logprobs"),
    ],
)
def test_rows_that_do_not_fit_the_objective(name, message, make_recipe, new_run):
    recipe = make_recipe(f"{__name__}:{name}", steps=1)
    run = RunFolder.create(new_run, recipe)
    with pytest.raises(ConfigError, match=message):
        train(run, recipe, Silent())
    assert run.read_metrics() == []
