from __future__ import annotations

import http.client
import itertools
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from run_builder import group, make_run
from run_builder import write_evaluation as write_validation

from graftrl.chunks import EVALUATION
from graftrl.errors import ConfigError, DataError, RunError
from graftrl.lab.cache import SHIPPED
from graftrl.logs.rollouts import write_rollouts, write_transfers
from graftrl.methods import Transfer
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt, Response
from graftrl.viewer.runs import TOKENS_SHOWN, open_runs
from graftrl.viewer.server import STATIC, ViewServer


@contextmanager
def serving(*paths: Path) -> Iterator[ViewServer]:
    with ViewServer(open_runs(paths)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(
    server: ViewServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def ask(server: ViewServer, name: str, **given: Any) -> Any:
    status, _, body = get(server, f"/api/{name}?{urlencode(given)}")
    content = json.loads(body)
    assert (status == 200) == ("error" not in content)
    return content


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "graft", "graft", 0, grafts=True)
    make_run(root / "grpo", "grpo", 3)
    with serving(root) as running:
        yield running


# Who may ask ----------------------------------------------------------------------------------------------------------


def test_only_this_machine_can_reach_it(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}/"


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost:{port}."]
)
@pytest.mark.parametrize("path", ["/", "/view.js", "/api/runs"])
def test_another_host_name_is_refused(server: ViewServer, host: str, path: str) -> None:
    status, _, body = get(server, path, host.format(port=server.port))
    assert status == 403
    assert b"graft" not in body.replace(b"graftrl", b"")


def test_localhost_is_this_machine(server: ViewServer) -> None:
    assert get(server, "/", f"localhost:{server.port}")[0] == 200


def test_every_answer_carries_the_policy(server: ViewServer) -> None:
    for path, expected in {**dict.fromkeys(STATIC, 200), "/api/runs": 200, "/api/prompt?run=9": 400, "/x": 404}.items():
        status, headers, _ = get(server, path)
        assert status == expected
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path", ["/../runs.py", "/static/view.js", "/view.js/../../server.py", "//etc/passwd", "/%2e%2e/x"]
)
def test_nothing_but_the_page_is_served(server: ViewServer, path: str) -> None:
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(server: ViewServer, method: str) -> None:
    assert get(server, "/api/runs", method=method)[0] == 501


def test_the_page_has_no_other_resource_and_never_reads_text_as_markup() -> None:
    static = Path(__file__).parents[2] / "src" / "graftrl" / "viewer" / "static"
    for file in static.iterdir():
        text = file.read_text()
        assert "http:" not in text.replace("http://www.w3.org", "")
        assert "https:" not in text
        for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "style="):
            assert sink not in text, (file.name, sink)


# Answers --------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_what_they_hold(server: ViewServer) -> None:
    first, second = ask(server, "runs")["runs"]
    assert (first["name"], first["method"], first["models"], first["steps"]) == (
        "graft",
        "graft",
        ["A", "B"],
        [1, 2, 3],
    )
    assert (first["prompts"], first["exchanges"]) == (6, True)
    assert (second["name"], second["seed"], second["exchanges"]) == ("grpo", 3, False)


def test_prompts_are_listed_page_by_page(server: ViewServer) -> None:
    whole = ask(server, "prompts", size=500)
    assert whole["total"] == 6
    parts = [ask(server, "prompts", size=4, page=page)["items"] for page in range(3)]
    assert [len(part) for part in parts] == [4, 2, 0]
    assert [item for part in parts for item in part] == whole["items"]
    first = whole["items"][0]
    assert (first["step"], first["prompt"]) == (1, "p1")
    assert first["groups"] == [
        {"model": "A", "k": 0, "n": 2, "reward": 0.0},
        {"model": "B", "k": 1, "n": 2, "reward": 0.5},
    ]
    (moved,) = first["moved"]
    assert (moved["source"], moved["receiver"], moved["responses"], moved["admitted"]) == ("B", "A", 2, 1)
    assert moved["score"] == pytest.approx(0.7)


def test_filters_reach_the_index(server: ViewServer) -> None:
    taken = ask(
        server,
        "prompts",
        exchange="taken",
        model="A",
        first=2,
        last=2,
        reward="fail",
        low=0,
        high=0.5,
        text="QUESTION P1",
    )
    assert [(item["step"], item["prompt"]) for item in taken["items"]] == [(2, "p1")]
    assert ask(server, "prompts", run=1, exchange="passed")["total"] == 0  # GRPO passes nothing by


def test_a_prompt_shows_both_groups_and_their_fate(server: ViewServer) -> None:
    found = ask(server, "prompt", step=2, prompt="p1")
    assert (found["task"], found["reference"]) == ("toy", "42")
    assert found["messages"] == [{"role": "user", "content": "question p1"}]
    assert [(r["receiver"], r["outcome"]) for r in found["reasons"]] == [("A", "taken"), ("B", "none")]
    a, b = found["columns"]
    assert (a["model"], a["k"], a["n"], a["version"]) == ("A", 0, 2, 1)
    assert [response["moved"] for response in a["responses"]] == [[], []]
    admitted, gated = (response["moved"][0] for response in b["responses"])
    assert admitted == {
        "receiver": "A", "status": "admitted", "reason": "", "score": 0.9, "weight": 0.9, "advantage": 0.7,
        "receiver_tokens": 3,
    }  # fmt: skip
    assert (gated["status"], gated["reason"]) == ("gated", "score")
    first = b["responses"][0]
    assert (first["text"], first["reward"], first["ids"], first["logprobs"]) == ("answer 0", 1.0, [1, 2], [-0.1, -0.2])
    assert first["mean"] == pytest.approx(-0.1)  # without the EOS
    assert first["pieces"] is None
    assert first["uncut"] == "no tokenizer of B on this machine"
    assert found["around"] == {
        "before": {"step": 1, "prompt": "p2"}, "after": {"step": 2, "prompt": "p2"}, "position": 2, "total": 6,
    }  # fmt: skip
    alone = ask(server, "prompt", step=2, prompt="p1", first=3)
    assert alone["around"] == {"before": None, "after": None, "position": None, "total": 2}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("prompts", {"run": 7}, "run 7: there are 2"),
        ("prompts", {"run": "x"}, "run 'x': not a number"),
        ("prompts", {"first": 10**12}, "too large"),
        ("prompts", {"low": "nan"}, "too large"),
        ("prompts", {"reward": "good"}, "not one of fail, behind, mixed, success"),
        ("prompt", {"step": 1}, "no prompt '' in step 1"),
        ("prompt", {"prompt": "p1"}, "step '': not a number"),
        ("tokens", {"step": 1, "prompt": "p1", "of": "A", "index": 9}, "no response 9 of 'A'"),
    ],
)
def test_what_cannot_be_answered_is_said(server: ViewServer, name: str, given: dict[str, Any], said: str) -> None:
    assert said in ask(server, name, **given)["error"]


def _one_group_run(root: Path, texts: list[str], logprobs: list[float], ids: list[int]) -> Path:
    run = make_run(root, "grpo", steps=1)
    prompt = Prompt("long", ({"role": "user", "content": "?"},), "42", "toy")
    responses = [
        Response(text, np.array(ids), np.array(logprobs, np.float32), "stop", float(i)) for i, text in enumerate(texts)
    ]
    write_rollouts(
        run / "rollouts" / "step-000002.parquet", run="r", step=2, groups={"A": [Group("A", prompt, responses)]},
        sampling=SamplingSettings(), fingerprints={"A": "a"},
    )  # fmt: skip
    return run


def test_long_responses_come_in_two_parts_and_infinities_as_unknown(tmp_path: Path) -> None:
    count = TOKENS_SHOWN + 10
    run = _one_group_run(tmp_path / "r", ["a", "b"], [-math.inf, math.nan, *[-1.0] * (count - 2)], [5] * count)
    with serving(run) as server:
        response = ask(server, "prompt", step=2, prompt="long")["columns"][0]["responses"][1]
        assert (response["length"], len(response["ids"]), len(response["logprobs"])) == (
            count,
            TOKENS_SHOWN,
            TOKENS_SHOWN,
        )
        assert response["logprobs"][:3] == [None, None, -1.0]
        assert response["mean"] == -1.0
        whole = ask(server, "tokens", step=2, prompt="long", of="A", index=1)
        assert len(whole["ids"]) == len(whole["logprobs"]) == count


def test_a_stored_peers_group_comes_from_its_log(tmp_path: Path) -> None:
    from run_builder import metrics_line, recipe_content

    from graftrl.config import parse_recipe
    from graftrl.training.run_folder import RunFolder

    log = make_run(tmp_path / "log", text="theirs")
    recipe = {**recipe_content("graft"), "models": {"A": {"path": str(next(SHIPPED.glob("A-*")))}}}
    recipe["peers"] = {"P": {"log": str(log), "model": "B", "match": "prompt"}}
    run = RunFolder.create(tmp_path / "run", parse_recipe(recipe, "test"))
    run.append_metrics({**metrics_line(1, {}), "models": {}})
    write_rollouts(
        run.step_file("rollouts", 1), run="r", step=1, groups={"A": [group("A", "p1", [0.0, 0.0], "mine")]},
        sampling=SamplingSettings(), fingerprints={"A": "a"},
    )  # fmt: skip
    moved = [Transfer("A", "P", "p1", i, "admitted", "", float(i), 0.7, 0.9, 0.9, 3, source_step=3) for i in (0, 1)]
    write_transfers(run.step_file("exchange", 1), 1, moved)
    with serving(run.root) as server:
        own, peer = ask(server, "prompt", step=1, prompt="p1")["columns"]
        assert [response["text"] for response in own["responses"]] == ["mine 0", "mine 1"]
        assert (peer["model"], peer["stored"], peer["k"]) == ("P", True, 1)  # rewards are this run's verifier's
        assert [response["text"] for response in peer["responses"]] == ["theirs 0", "theirs 1"]
        for file in (log / "rollouts").iterdir():
            file.unlink()
        _, peer = ask(server, "prompt", step=1, prompt="p1")["columns"]
        assert peer["responses"][0]["text"] == "(the peer's log is not there any more)"


# Opening --------------------------------------------------------------------------------------------------------------


def test_a_log_without_a_recipe_is_shown_without_reasons(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", "graft", grafts=True)
    for path in (run / "rollouts", run / "rollouts" / "step-000001.parquet"):
        (viewed,) = open_runs([path])
        assert viewed.summary()["method"] == ""
        assert viewed.prompt(1, "p1")["reasons"] == []


def test_runs_that_have_not_begun_are_left_out_unless_there_is_no_other(tmp_path: Path) -> None:
    begun = make_run(tmp_path / "all" / "begun")
    empty = make_run(tmp_path / "all" / "empty", seed=1, steps=0, planned_steps=3)
    assert [run.path for run in open_runs([tmp_path / "all"])] == [begun]
    with pytest.raises(RunError, match="no step has been finished yet"):
        open_runs([empty])


def write_evaluation(root: Path, *, runs: int = 2, benchmarks: tuple[str, ...] = ("sums", "humaneval+")) -> Path:
    """Two models on some benchmarks; A solves p1 never and p2 always, B both once of twice."""
    rewards = {"A": ([0.0, 0.0], [1.0, 1.0]), "B": ([1.0, 0.0], [0.0, 1.0])}
    for model, name, run in itertools.product(rewards, benchmarks, range(1, 1 + runs)):
        groups = [group(model, f"p{i}", of, f"{model} said") for i, of in enumerate(rewards[model], start=1)]
        write_rollouts(
            root / "rollouts" / model / name / f"run-{run:02d}-chunk-0001.parquet",
            run=root.name, step=run, groups={model: groups}, sampling=SamplingSettings(temperature=0.6),
            fingerprints={model: model}, policy_version=40 if model == "B" else 0,
        )  # fmt: skip
    models = {"A": {"path": "models/a.gguf"}, "B": {"path": "models/b"}}
    EVALUATION.write(root, {"models": models, "benchmarks": {name: {} for name in (*benchmarks, "not-begun")}}, {})
    return root


def test_an_evaluation_shows_its_models_side_by_side_for_each_benchmark(tmp_path: Path) -> None:
    with serving(write_evaluation(tmp_path / "eval")) as server:
        first, second = ask(server, "runs")["runs"]
        assert (first["name"], second["name"]) == ("eval: sums", "eval: humaneval+")
        assert (first["kind"], first["models"], first["steps"], first["prompts"]) == (
            "evaluation",
            ["A", "B"],
            [1, 2],
            4,
        )
        assert first["pass_at_1"] == {"A": 0.5, "B": 0.5}
        behind = ask(server, "prompts", run=1, reward="behind", model="A", first=2)
        assert [(item["step"], item["prompt"]) for item in behind["items"]] == [(2, "p1")]
        assert ask(server, "prompts", run=1, text="B said 1", model="B")["total"] == 4
        shown = ask(server, "prompt", run=1, step=2, prompt="p1")
    assert [(of["model"], of["k"], of["n"], of["version"]) for of in shown["columns"]] == [
        ("A", 0, 2, 0),
        ("B", 1, 2, 40),
    ]
    assert not any(of["trained"] for of in shown["columns"]) and shown["reasons"] == []
    uncut = [of["responses"][0]["uncut"] for of in shown["columns"]]
    assert uncut == [
        "the tokenizer of A lies in a GGUF file, which is not opened here",
        "no tokenizer of B on this machine",
    ]


def test_evaluations_are_found_in_nested_folders_and_inside_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine", "graft")
    write_evaluation(run / "evaluations" / "math", benchmarks=("sums",))
    write_evaluation(tmp_path / "runs" / "deep" / "er" / "eval", benchmarks=("sums",))
    names = ["mine", "eval: sums", "math: sums"]
    assert [viewed.name for viewed in open_runs([tmp_path / "runs"])] == names
    assert [viewed.name for viewed in open_runs([run])] == ["mine", "math: sums"]
    assert [viewed.name for viewed in open_runs([run, run / "evaluations", run])] == ["mine", "math: sums"]
    assert [viewed.name for viewed in open_runs([tmp_path / "runs" / "deep"])] == ["eval: sums"]


def test_an_evaluation_that_is_under_way_is_taken_in_and_one_without_responses_is_told(tmp_path: Path) -> None:
    (viewed,) = open_runs([write_evaluation(tmp_path / "eval", runs=1, benchmarks=("sums",))])
    assert viewed.summary()["steps"] == [1]
    write_evaluation(tmp_path / "eval", runs=2, benchmarks=("sums",))
    assert viewed.summary()["steps"] == [1, 2]
    write_evaluation(tmp_path / "none", runs=0)
    with pytest.raises(RunError, match="no response has been sampled yet"):
        open_runs([tmp_path / "none"])


def test_the_best_step_in_validation_is_told_and_follows_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", before={"x": 0, "y": 1})
    (viewed,) = open_runs([run])
    assert viewed.summary()["best"] is None  # the start is no step
    for step, right in ((1, 1), (2, 0)):
        write_validation(run, step, {model: {"x": right, "y": 1} for model in "AB"})
        assert viewed.summary()["best"] == {"step": 1, "score": 1.0}


def test_names_are_as_long_as_it_takes_to_tell_runs_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / where / "seed0") for where in ("x", "y")]
    assert [run.name for run in open_runs(folders)] == ["x/seed0", "y/seed0"]


def test_what_cannot_be_opened_is_one_line(graftrl: Any, tmp_path: Path) -> None:
    code, _, error = graftrl("view", tmp_path / "nothing", "--no-browser")
    assert (code, error) == (3, f"error: {tmp_path / 'nothing'}: no such folder\n")
    (tmp_path / "empty").mkdir()
    assert "no run in it" in graftrl("view", tmp_path / "empty", "--no-browser")[2]
    run = make_run(tmp_path / "r")
    (run / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=r"step-000002\.parquet: torn"):
        open_runs([run])


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    runs = open_runs([make_run(tmp_path / "r")])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot be used"):
            ViewServer(runs, port)


def test_the_command_prints_its_address_and_ends_on_ctrl_c(graftrl: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(self: ViewServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ViewServer, "serve_forever", interrupted)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    code, printed, error = graftrl("view", make_run(tmp_path / "r"), "--no-browser")
    assert (code, error, opened) == (0, "", [])
    assert printed.startswith("http://127.0.0.1:")
    _, printed, _ = graftrl("view", tmp_path / "r")
    assert opened == [printed.split()[0]]
