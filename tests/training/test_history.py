import numpy as np
import polars as pl
import pytest

from graftrl.errors import DataError
from graftrl.training.history import History
from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(make_recipe, tmp_path_factory):
    recipe = make_recipe("grpo", steps=3)
    run = RunFolder.create(tmp_path_factory.mktemp("history") / "run", recipe)
    train(run, recipe, Silent())
    return run


def test_groups_come_back_as_they_were_logged_with_their_step(run):
    groups = History(run)("A", range(1, 4))
    assert [group.log_step for group in groups] == [1] * 8 + [2] * 8 + [3] * 8
    frame = pl.read_parquet(run.step_file("rollouts", 2)).filter(model="A").sort("prompt_id", "response_index")
    of_step = [group for group in groups if group.log_step == 2]
    assert [group.prompt.id for group in of_step] == frame["prompt_id"].unique(maintain_order=True).to_list()
    logged = [response for group in of_step for response in group.responses]
    assert [response.reward for response in logged] == frame["reward"].to_list()
    for response, ids, logprobs in zip(logged, frame["token_ids"], frame["logprobs"], strict=True):
        assert response.token_ids.tolist() == ids.to_list()
        assert response.logprobs.dtype == np.float32 and np.array_equal(response.logprobs, logprobs.to_numpy())


def test_a_file_is_read_once_and_forgotten_when_no_longer_asked_for(run, monkeypatch):
    read = []
    original = History._read
    monkeypatch.setattr(History, "_read", lambda self, m, s: (read.append((m, s)), original(self, m, s))[1])
    history = History(run)
    history("A", range(1, 3))
    history("B", range(2, 3))
    history("A", range(2, 4))
    assert read == [("A", 1), ("A", 2), ("B", 2), ("A", 3)]
    history("A", range(1, 2))
    assert read[-1] == ("A", 1)  # it had left the window


def test_a_model_that_logged_nothing_has_no_history_and_a_missing_file_is_named(run):
    assert History(run)("C", range(1, 4)) == [] and History(None)("A", range(1, 4)) == []
    with pytest.raises(DataError, match="step-000009"):
        History(run)("A", range(9, 10))
