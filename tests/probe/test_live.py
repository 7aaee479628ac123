from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from graftrl.config import Recipe
from graftrl.errors import ModelError, RunError
from graftrl.logs.config import PeerSettings
from graftrl.logs.reader import RolloutLog
from graftrl.probe import live
from graftrl.tasks import build_task
from graftrl.training.data import PromptStream
from graftrl.training.peers import StoredPeer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(live, "CHUNK", 4)


@pytest.fixture
def no_model(monkeypatch):
    """From here on nothing may load a model."""

    def forbid() -> None:
        def refuse(recipe: Recipe) -> None:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(live, "LocalEngine", refuse)

    return forbid


def frames(root: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(file) for file in sorted((root / "rollouts").glob("step-*.parquet"))])


def test_a_probes_folder_is_a_rollout_log_of_the_first_training_prompts(recipe, tmp_path):
    settings = recipe()
    seen: list[tuple[int, int]] = []
    live.sample(settings, tmp_path, 10, lambda *progress: seen.append(progress))
    assert seen == [(4, 10), (8, 10), (10, 10)]
    log = RolloutLog(tmp_path)
    stream = PromptStream(build_task(settings.task).train, 10, settings.seed)
    ids = [prompt.id for prompt in stream.batch(0)]
    assert live.sampled_prompts(tmp_path, 10) == ids and live.sampled_prompts(tmp_path, 6) == ids[:6]
    for model in "AB":
        assert sorted(log.group_index(model)["prompt_id"]) == sorted(ids)
        assert log.group_index(model)["n"].to_list() == [4] * 10
    rows = frames(tmp_path)
    assert rows["reward"].is_in([0.0, 1.0]).all() and 0 < rows["reward"].mean() < 1
    assert rows["policy_version"].unique().to_list() == [0]  # every chunk is of the models as they were given


def test_finished_chunks_are_kept_and_more_prompts_only_add_to_them(recipe, tmp_path, no_model):
    live.sample(recipe(), tmp_path, 8)
    before = [file.read_bytes() for file in sorted((tmp_path / "rollouts").iterdir())]
    live.sample(recipe(), tmp_path, 12)
    after = [file.read_bytes() for file in sorted((tmp_path / "rollouts").iterdir())]
    assert after[:2] == before and len(after) == 3
    no_model()
    assert live.sample(recipe(), tmp_path, 12) == []
    assert live.sample(recipe(), tmp_path, 6) == []


def test_an_interrupted_probe_goes_on_to_the_same_responses(recipe, tmp_path, monkeypatch):
    live.sample(recipe(), tmp_path / "whole", 12)
    write, calls = live.write_rollouts, []

    def killed(path: Path, **content: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(path, **content)

    monkeypatch.setattr(live, "write_rollouts", killed)
    with pytest.raises(KeyboardInterrupt):
        live.sample(recipe(), tmp_path / "cut", 12)
    assert len(list((tmp_path / "cut" / "rollouts").iterdir())) == 1
    monkeypatch.setattr(live, "write_rollouts", write)
    live.sample(recipe(), tmp_path / "cut", 12)
    assert frames(tmp_path / "cut").equals(frames(tmp_path / "whole"))


def test_a_cut_last_chunk_is_filled_up_with_its_scores(recipe, tmp_path):
    live.sample(recipe(), tmp_path / "grown", 6)
    live.sample(recipe(), tmp_path / "grown", 8)
    live.sample(recipe(), tmp_path / "whole", 8)
    assert frames(tmp_path / "grown").equals(frames(tmp_path / "whole"))
    scores = [pl.read_parquet(tmp_path / name / "exchange" / "step-000002.parquet") for name in ("grown", "whole")]
    assert scores[0].equals(scores[1])


def test_chunks_without_their_scores_are_sampled_again(recipe, tmp_path):
    live.sample(recipe(), tmp_path, 4)
    (tmp_path / "exchange" / "step-000001.parquet").unlink()
    live.sample(recipe(), tmp_path, 4)
    assert (tmp_path / "exchange" / "step-000001.parquet").exists()


def test_a_task_with_fewer_prompts_is_probed_whole(recipe, tmp_path):
    notes = live.sample(recipe(task={"kind": "hidden_programs", "train_size": 5}), tmp_path, 100)
    assert "the task has only 5 usable training prompts" in notes
    assert len(live.sampled_prompts(tmp_path, 100)) == 5


def test_what_only_training_needs_does_not_matter(recipe, tmp_path, no_model):
    live.sample(recipe(), tmp_path, 4)
    no_model()
    other = recipe(method="grpo", training={"steps": 9, "prompts_per_step": 64, "group_size": 4})
    assert live.sample(other, tmp_path, 4) == []


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"seed": 2}, r"another seed \(1 there, 2 here\)"),
        ({"task": {"kind": "hidden_programs", "length": 6}}, r"task\.length"),
        ({"sampling": {"max_prompt_tokens": 32, "max_response_tokens": 31}}, r"sampling\.max_response_tokens"),
        ({"training": {"steps": 1, "prompts_per_step": 32, "group_size": 8}}, "group_size"),
    ],
)
def test_a_folder_with_responses_to_something_else_is_refused(recipe, tmp_path, sections, what):
    live.sample(recipe(), tmp_path, 4)
    with pytest.raises(RunError, match=what):
        live.sample(recipe(**sections), tmp_path, 4)


def test_weights_that_changed_since_are_noticed_and_missing_ones_do_not_matter(recipe, tmp_path, warm):
    folder = tmp_path / "model"
    folder.symlink_to(warm["A"], target_is_directory=True)
    settings = recipe(models={"A": {"path": str(folder)}, "B": {"path": warm["B"]}})
    live.sample(settings, tmp_path / "out", 4)
    folder.unlink()
    assert live.sample(settings, tmp_path / "out", 4) == []  # what the model said is still here
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(RunError, match="files of model 'A' have changed"):
        live.sample(settings, tmp_path / "out", 4)


def test_a_folder_that_is_no_probes_is_left_alone(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: x")
    with pytest.raises(RunError, match="something else than a probe"):
        live.sample(recipe(), tmp_path / "run", 4)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "probe.yaml").write_text("[1, 2")
    with pytest.raises(RunError, match="not what a probe writes"):
        live.sample(recipe(), tmp_path / "odd", 4)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_model_that_does_not_load_leaves_nothing_behind(recipe, tmp_path, warm):
    with pytest.raises(ModelError, match=r"models\.B\.path: no directory"):
        live.sample(recipe(models={"A": {"path": warm["A"]}, "B": {"path": "/none/of/it"}}), tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_a_probe_serves_as_a_stored_peer(recipe, tmp_path):
    settings = recipe()
    live.sample(settings, tmp_path, 8)
    peer = StoredPeer("B", PeerSettings(log=tmp_path, model="B", match="prompt"), seed=0)
    peer.check(PromptStream(build_task(settings.task).train, 4, settings.seed), steps=2)
    assert peer.notes == []  # it has an answer to every prompt of both steps
