from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs_builder import WORDS, Said, write_random_log

from graftrl.errors import DataError
from graftrl.viewer.index import EXCHANGES, REWARDS, LogIndex, Query


def usable(k: int, n: int, k_peer: int, n_peer: int) -> bool:
    return k == 0 and 1 <= k_peer < n_peer


def fits(query: Query, group: Said, said: list[Said]) -> bool:
    """The definition of a query, in plain Python."""
    k, n = group.rewards.count(1.0), len(group.rewards)
    peers = [g for g in said if (g.step, g.prompt) == (group.step, group.prompt) and g.model != group.model]
    text = query.text.lower()
    where = [*group.texts, group.question, group.reference]
    others = [g for g in said if (g.step, g.prompt) == (group.step, group.prompt) and g.rewards.count(1.0)]
    kinds = {"": True, "fail": k == 0, "behind": k == 0 and bool(others), "success": k == n, "mixed": 0 < k < n}
    exchanges = {
        "": True,
        "taken": "admitted" in group.statuses,
        "refused": bool(group.statuses) and "admitted" not in group.statuses,
        "none": not group.statuses,
        "passed": not group.statuses
        and any(usable(k, n, peer.rewards.count(1.0), len(peer.rewards)) for peer in peers),
    }
    return (
        (query.first is None or group.step >= query.first)
        and (query.last is None or group.step <= query.last)
        and query.model in ("", group.model)
        and kinds[query.reward]
        and (query.low is None or k / n >= query.low)
        and (query.high is None or k / n <= query.high)
        and exchanges[query.exchange]
        and (not text or any(text in each.lower() for each in where))
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[LogIndex, list[Said]]:
    root = tmp_path_factory.mktemp("log")
    said = write_random_log(root, seed=0)
    return LogIndex(root, root / "exchange"), said


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.none() | st.integers(0, 5),
    last=st.none() | st.integers(0, 5),
    model=st.sampled_from(["", "A", "C", "nobody"]),
    reward=st.sampled_from(REWARDS),
    low=st.none() | st.sampled_from([0.0, 0.4, 0.5, 1.0]),
    high=st.none() | st.sampled_from([0.0, 0.5, 0.7]),
    exchange=st.sampled_from(EXCHANGES),
    text=st.sampled_from(["", "apple", "DATE apple", "ß", "(A|B)", "5.0*X", "a.c", "nowhere"]),
)
def test_queries_find_what_their_definition_says(log: tuple[LogIndex, list[Said]], **options: object) -> None:
    index, said = log
    query = Query(**options)  # type: ignore[arg-type]
    expected = sorted({(group.step, group.prompt) for group in said if fits(query, group, said)})
    assert index.current().find(query, usable).rows() == expected


def test_single_filters_leave_something_and_leave_something_out(log: tuple[LogIndex, list[Said]]) -> None:
    index, said = log
    everything = len({(group.step, group.prompt) for group in said})
    queries = [Query(reward=kind) for kind in REWARDS[1:]] + [Query(exchange=kind) for kind in EXCHANGES[1:4]]
    for query in [*queries, Query(text="apple"), Query(model="B", first=2, last=3)]:
        assert 0 < index.current().find(query, usable).height < everything, query


def test_without_a_rule_nothing_was_passed(log: tuple[LogIndex, list[Said]]) -> None:
    assert log[0].current().find(Query(exchange="passed")).is_empty()


def test_groups_and_transfers_are_counted(log: tuple[LogIndex, list[Said]]) -> None:
    index, said = log
    groups = index.current().groups.select("step", "prompt_id", "model", "n", "k").rows()
    assert sorted(groups) == sorted((g.step, g.prompt, g.model, len(g.rewards), g.rewards.count(1.0)) for g in said)
    moved = index.current().moved.select("step", "prompt_id", "model", "admitted", "gated", "rejected").rows()
    states = ("admitted", "gated", "rejected")
    assert sorted(moved) == sorted(
        (g.step, g.prompt, g.model, *(g.statuses.count(state) for state in states)) for g in said if g.statuses
    )


def test_a_prompt_is_read_from_the_files_of_its_step_alone(tmp_path: Path) -> None:
    said = write_random_log(tmp_path, seed=1)
    log = LogIndex(tmp_path, tmp_path / "exchange").current()
    group = next(g for g in said if g.step == 2 and g.statuses)
    for file in (tmp_path / "rollouts").glob("*"):
        if file.name != "step-000002.parquet":
            file.write_bytes(b"torn")
    rows = log.responses(2, group.prompt)
    assert rows.filter(model=group.model)["text"].to_list() == group.texts
    assert log.transfers(2, group.prompt).filter(receiver=group.model)["status"].to_list() == group.statuses
    untouched = next(g for g in said if not any(o.statuses for o in said if (o.step, o.prompt) == (g.step, g.prompt)))
    assert log.transfers(untouched.step, untouched.prompt).is_empty()
    with pytest.raises(DataError, match="no prompt 'p99' in step 2"):
        log.responses(2, "p99")
    other = next(g for g in said if g.step == 1)
    with pytest.raises(DataError, match=r"step-000001\.parquet: torn"):
        log.responses(1, other.prompt)


def test_what_a_running_run_adds_replaces_and_drops_is_seen(tmp_path: Path) -> None:
    write_random_log(tmp_path, seed=2, steps=2)
    index = LogIndex(tmp_path, tmp_path / "exchange")
    before = index.current()
    assert index.current() is before
    assert before.steps == [1, 2]
    found = before.find(Query(text=WORDS[0].lower())).height
    write_random_log(tmp_path, seed=3, steps=5)  # replaces two steps and adds three
    after = index.current()
    fresh = LogIndex(tmp_path, tmp_path / "exchange").current()
    order = ["step", "prompt_id", "model"]
    assert after.groups.sort(order).equals(fresh.groups.sort(order))
    assert after.moved.sort(order).equals(fresh.moved.sort(order))
    assert after.find(Query(text=WORDS[0].lower())).height > found
    for step, folder in itertools.product((1, 5), ("rollouts", "exchange")):
        (tmp_path / folder / f"step-{step:06d}.parquet").unlink(missing_ok=True)
    assert index.current().steps == [2, 3, 4]
    group = index.current().groups.row(-1, named=True)
    assert index.current().responses(4, group["prompt_id"])["step"].unique().to_list() == [4]


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    write_random_log(tmp_path, seed=4)
    file = next((tmp_path / "exchange").glob("*"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"exchange/{file.name}: torn"):
        LogIndex(tmp_path, tmp_path / "exchange").current()
    with pytest.raises(DataError, match="no such file or folder"):
        LogIndex(tmp_path / "nothing").current()
