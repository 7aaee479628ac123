"""The hub out of reach: one short question, then the local cache, and one line that says so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants

from graftrl import hub
from graftrl.errors import DataError, ModelError
from graftrl.hub import hub_or_cache
from graftrl.policies.config import ModelSettings
from graftrl.policies.loading import load
from graftrl.tasks.config import DataSource
from graftrl.tasks.data import chosen_rows


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_asked", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as free:  # a port that nobody listens at
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    return endpoint


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that refuses everything, but answers; what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield asked
        server.shutdown()


def test_a_hub_that_answers_stays_in_use_and_is_asked_once(answering: list[str]) -> None:
    for _ in range(3):
        with hub_or_cache() as obstacle:
            assert obstacle is None
            assert not constants.HF_HUB_OFFLINE
    assert len(answering) == 1


def test_the_cache_serves_where_the_hub_does_not_answer_and_the_setting_comes_back(unreachable: str) -> None:
    import datasets

    for _ in range(2):
        with hub_or_cache() as obstacle:
            assert obstacle is not None and f"{unreachable} does not answer" in obstacle
            assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    with pytest.raises(RuntimeError), hub_or_cache():
        raise RuntimeError
    assert not constants.HF_HUB_OFFLINE


def test_a_hub_that_comes_back_is_asked_again_after_a_while(unreachable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_or_cache():
        pass
    when, obstacle = hub._asked[unreachable]
    assert obstacle is not None
    monkeypatch.setitem(hub._asked, unreachable, (when - hub._TRUST_S - 1, None))
    with hub_or_cache() as asked_again:
        assert asked_again is not None


def test_offline_mode_asks_nothing(answering: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with hub_or_cache() as obstacle:
        assert obstacle == "HF_HUB_OFFLINE is set, so that it is not asked"
    assert answering == [] and constants.HF_HUB_OFFLINE


def test_a_model_and_a_data_set_of_the_hub_fail_at_once_in_one_line(unreachable: str) -> None:
    """Without retries: the client would wait 1 + 2 + 4 + 8 + 8 seconds for each file."""
    with pytest.raises(ModelError) as model:
        load("m", ModelSettings(path="nobody/no-such-model", device="cpu"), torch.device("cpu"))
    with pytest.raises(DataError) as data:
        chosen_rows(DataSource(hub="nobody/no-such-data-set"))
    for caught, begin in ((model, "models.m.path: cannot load the tokenizer"), (data, "hub:nobody/no-such-data-set")):
        message = str(caught.value)
        assert message.startswith(begin) and "\n" not in message
        assert f"in the hub's local cache, and {unreachable} does not answer" in message
