"""What a script sees of an exchange through a folder. The rules of waiting and reading are in tests/live."""

import logging
import threading

import numpy as np
import pytest

from graftrl.errors import ConfigError, DataError, RunError
from graftrl.integrations.folder_exchange import FolderExchange
from graftrl.rollout import Group, Prompt, Response


def groups(model, ids, reward=1.0):
    return [
        Group(
            model,
            Prompt(q, ({"role": "user", "content": f"{model} asks {q}"},), "", "t"),
            [
                Response(f"{model}{i}", np.array([3, 4, 2]), np.array([-0.5, -1.0, -0.1], np.float32), "stop", r)
                for i, r in enumerate((reward, 0.0))
            ],
        )
        for q in ids
    ]


def side(folder, name, peer, **changes):
    return FolderExchange(folder, name, peer, **{"timeout_s": 5.0, "poll_s": 0.01, **changes})


def test_both_sides_get_what_the_other_gave_on_their_own_prompts(tmp_path):
    a, b = side(tmp_path, "A", "B"), side(tmp_path, "B", "A")
    found = {}

    def run(exchange, given):
        found[exchange.name] = [exchange.swap(step, given, f"tokens-{exchange.name}", step - 1) for step in (1, 2)]

    threads = [
        threading.Thread(target=run, args=(a, groups("A", ["p", "q"]))),
        threading.Thread(target=run, args=(b, groups("B", ["q", "p", "r"]))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    for received, fingerprint in found["A"]:
        assert fingerprint == "tokens-B"
        assert [group.prompt.id for group in received] == ["p", "q"]  # r was not asked here
        assert {group.model for group in received} == {"B"}
        assert received[0].prompt.text == "A asks p"
        response = received[0].responses[0]
        assert (response.text, response.reward, response.finish_reason) == ("B0", 1.0, "stop")
        np.testing.assert_array_equal(response.logprobs, np.array([-0.5, -1.0, -0.1], np.float32))
    assert [group.prompt.id for group in found["B"][0][0]] == ["q", "p"]
    assert not a.alone and not b.alone


def test_alone_it_says_so_once_and_exchanges_again_when_the_peer_is_back(tmp_path, caplog):
    a = side(tmp_path, "A", "B", timeout_s=0.05)
    with caplog.at_level(logging.WARNING, "graftrl"):
        for step in (7, 8):
            assert a.swap(step, groups("A", ["p"]), "tokens-A", step - 1) is None
            assert a.alone and a.file("A", step).exists()
        assert caplog.text.count("ALONE") == 1 and "step 7" in caplog.text
        side(tmp_path, "B", "A").swap(8, groups("B", ["p"]), "tokens-B", 7)
        side(tmp_path, "B", "A", timeout_s=0.01).swap(9, groups("B", ["p"]), "tokens-B", 8)
        received, _ = a.swap(9, groups("A", ["p"]), "tokens-A", 8)
    assert [group.model for group in received] == ["B"] and not a.alone
    assert "heard again" in caplog.text


def test_a_side_whose_groups_are_all_ungraded_gives_nothing_and_takes_nothing(tmp_path):
    side(tmp_path, "B", "A", timeout_s=0.01).swap(1, [], "tokens-B", 0)
    a = side(tmp_path, "A", "B")
    assert a.swap(1, groups("A", ["p"]), "tokens-A", 0) is None
    assert a.alone and a.waited_s < 1


def test_a_folder_of_an_earlier_run_is_refused_unless_the_run_is_resumed(tmp_path):
    side(tmp_path, "A", "B", timeout_s=0.01).swap(1, groups("A", ["p"]), "tokens-A", 0)
    again = side(tmp_path, "A", "B", timeout_s=0.01)
    with pytest.raises(RunError, match="earlier run"):
        again.begin(0)
    again.begin(1)
    again.swap(1, groups("A", ["p"]), "tokens-A", 0)  # done again: it takes the place of what was there
    side(tmp_path, "B", "A").begin(0)


def test_a_file_that_is_no_log_is_named(tmp_path):
    a = side(tmp_path, "A", "B", timeout_s=0.05)
    file = a.file("B", 1)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match=r"B/rollouts/step-000001\.parquet: torn"):
        a.swap(1, groups("A", ["p"]), "tokens-A", 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peer": "A"}, "both sides"),
        ({"peer": "../B"}, "cannot name a folder"),
        ({"timeout_s": 0}, "positive"),
        ({"max_staleness": -1}, "0 or more"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        FolderExchange(**{"folder": tmp_path, "name": "A", "peer": "B", **changes})
