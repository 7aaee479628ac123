"""Two sides of an exchange through a folder; the waiting, the time-out, and what is refused."""

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
    assert [group.prompt.id for group in found["B"][0][0]] == ["p", "q"]
    assert not a.alone and not b.alone


def test_after_the_time_out_it_goes_on_alone_for_good_and_says_so_loudly(tmp_path, caplog):
    a = side(tmp_path, "A", "B", timeout_s=0.05)
    with caplog.at_level(logging.WARNING, "graftrl"):
        assert a.swap(7, groups("A", ["p"]), "tokens-A", 6) is None
    assert "step 7" in caplog.text and "GOES ON ALONE" in caplog.text and "'B'" in caplog.text
    assert a.alone and a.file("A", 7).exists()
    side(tmp_path, "B", "A").swap(7, groups("B", ["p"]), "tokens-B", 6)
    assert a.swap(8, groups("A", ["p"]), "tokens-A", 7) is None  # although the peer came
    assert not a.file("A", 8).exists()


def test_prompts_that_the_peer_did_not_answer_are_an_error(tmp_path):
    side(tmp_path, "B", "A", timeout_s=0.01).swap(1, groups("B", ["x"]), "tokens-B", 0)
    with pytest.raises(ConfigError, match="same data set, seed"):
        side(tmp_path, "A", "B").swap(1, groups("A", ["p"]), "tokens-A", 0)


def test_a_side_whose_groups_are_all_ungraded_gives_nothing_and_takes_nothing(tmp_path):
    side(tmp_path, "B", "A", timeout_s=0.01).swap(1, [], "tokens-B", 0)
    a = side(tmp_path, "A", "B")
    assert a.swap(1, groups("A", ["p"]), "tokens-A", 0) == ([], "")
    assert side(tmp_path, "B", "A").swap(1, [], "tokens-B", 0) == ([], "")


def test_a_folder_of_an_earlier_run_is_refused_unless_the_run_is_resumed(tmp_path):
    side(tmp_path, "A", "B", timeout_s=0.01).swap(1, groups("A", ["p"]), "tokens-A", 0)
    again = side(tmp_path, "A", "B")
    with pytest.raises(RunError, match="earlier run"):
        again.begin(0)
    again.begin(1)
    side(tmp_path, "B", "A").begin(0)


def test_a_file_that_is_no_log_is_named(tmp_path):
    a = side(tmp_path, "A", "B")
    file = a.file("B", 1)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match=r"step-000001\.parquet"):
        a.swap(1, groups("A", ["p"]), "tokens-A", 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"peer": "A"}, "both sides"), ({"peer": "../B"}, "cannot name a folder"), ({"timeout_s": 0}, "positive")],
)
def test_wrong_settings_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        FolderExchange(**{"folder": tmp_path, "name": "A", "peer": "B", **changes})
