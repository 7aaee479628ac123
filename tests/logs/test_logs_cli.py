"""`graftrl logs` as a user meets it: what is printed, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import polars as pl
import pytest

from graftrl.logs.reader import RolloutLog


class TestInspect:
    def test_table_shows_models_and_successes(self, graftrl, log):
        code, out, _ = graftrl("logs", "inspect", log)
        assert code == 0
        lines = [line.split() for line in out.splitlines()]
        assert ["groups", "6", "6"] in lines
        assert ["A", "4", "4", "1", "1", "4", "0", "1", "0", "1"] in lines

    def test_json(self, graftrl, log):
        code, out, _ = graftrl("logs", "inspect", log, "--json")
        assert code == 0 and json.loads(out)["models"]["A"]["successes"] == {"4": {"0": 4, "2": 1, "4": 1}}

    def test_names_are_not_read_as_markup(self, graftrl, write_log):
        _, out, _ = graftrl("logs", "inspect", write_log("run", {1: {"[red]A[/red]": {"p": (1, 0)}}}))
        assert "[red]A[/red]" in out

    def test_torn_log_is_one_line_and_a_failure(self, graftrl, log):
        file = log / "rollouts" / "step-000001.parquet"
        file.write_bytes(file.read_bytes()[:50])
        code, out, err = graftrl("logs", "inspect", log)
        assert code == 2 and out == "" and err.startswith(f"error: {file}: torn") and err.count("\n") == 1


class TestValidate:
    def test_good_log(self, graftrl, log):
        assert graftrl("logs", "validate", log) == (0, f"{log}: no problem found\n", "")
        code, out, _ = graftrl("logs", "validate", log, "--json")
        assert (code, json.loads(out)) == (0, {"path": str(log), "count": 0, "problems": []})

    def test_problems_are_listed_up_to_a_number_and_counted(self, graftrl, log, edit_file):
        file = log / "rollouts" / "step-000001.parquet"
        odd = pl.int_range(pl.len()) % 2 == 1
        edit_file(file, pl.when(odd).then(pl.lit("?")).otherwise("finish_reason").alias("finish_reason"))
        code, out, err = graftrl("logs", "validate", log, "--most", 3)
        assert code == 2
        assert out.splitlines() == [
            f"{file}, row {row}: has finish_reason '?', not stop or length" for row in (2, 4, 6)
        ] + ["... and 5 more; --most prints more of them"]
        assert err == f"error: {log}: 8 problems found\n"
        code, out, again = graftrl("logs", "validate", log, "--most", 3, "--json")
        assert (code, again, json.loads(out)["count"]) == (2, err, 8)
        message = "has finish_reason '?', not stop or length"
        assert json.loads(out)["problems"] == [
            {"file": str(file), "message": message, "first": row, "last": row} for row in (2, 4, 6)
        ]


class TestImportScoreMerge:
    @pytest.fixture
    def verl(self, tmp_path):
        folder = tmp_path / "verl"
        folder.mkdir()
        for step in (1, 2):
            rows = [
                {"input": prompt, "output": text, "gts": "1", "score": score, "step": step}
                for prompt in ("c1,2>", "c3,4>")
                for text, score in (("A:6,2", 1.0), (f"B:{step}", -1.0))
            ]
            (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    @pytest.fixture
    def sampling(self):
        return ("--temperature", 1, "--top-p", 1, "--top-k", -1)

    def test_from_a_foreign_log_to_usable_groups(self, graftrl, verl, sampling, pair, tmp_path):
        first, both = tmp_path / "first", tmp_path / "both"
        settings = (*sampling, "--success-above", 0, "--assume-finished", "--run", "r")
        code, out, err = graftrl("logs", "import", verl, "--format", "verl", "--model", "A", "--out", first, *settings)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"{first}: 8 responses in 4 groups, 2 steps"
        code, out, _ = graftrl("logs", "validate", first)
        assert code == 2 and f"{first}/step-000001.parquet, rows 1-4: has no log-probabilities" in out
        code, out, _ = graftrl("logs", "score", first, "--model", pair["A"], "--device", "cpu")
        total, note = out.splitlines()[-2:]
        assert code == 0 and total == f"{first}: 8 responses scored, 0 left without log-probabilities"
        assert note.startswith("note: they were sampled by 2 versions of the model")
        code, out, _ = graftrl("logs", "score", first, "--model", pair["A"], "--device", "cpu")
        assert code == 0 and out == f"{first}: 0 responses scored, 0 left without log-probabilities\n"
        code, out, _ = graftrl(
            "logs", "merge", first, first, "--out", both, "--rename", "2:A=B", "--step-offset", "2:5"
        )
        assert (code, out) == (0, f"{both}: 16 responses, 4 steps\n")
        assert graftrl("logs", "validate", both)[0] == 0
        assert RolloutLog(both).group_index("B").select("step", "n", "k").rows() == [(6, 2, 1)] * 2 + [(7, 2, 1)] * 2

    def test_sampling_settings_must_be_given(self, graftrl, verl, tmp_path):
        code, _, err = graftrl(
            "logs",
            "import",
            verl,
            "--format",
            "verl",
            "--model",
            "A",
            "--out",
            tmp_path / "x",
            "--top-p",
            1,
            "--top-k",
            0,
        )
        assert code == 2 and "--temperature" in err

    def test_unknown_sampling_is_null(self, graftrl, verl, tmp_path):
        out = tmp_path / "x"
        options = ("--temperature", "null", "--top-p", "null", "--top-k", "null", "--success-above", 0)
        assert graftrl("logs", "import", verl, "--format", "verl", "--model", "A", "--out", out, *options)[0] == 0
        assert RolloutLog(out).sampling("A") == {(None, None, None)}

    @pytest.mark.parametrize(
        ("option", "value", "fault"),
        [
            ("--temperature", "warm", "--temperature is 'warm', neither a number nor null"),
            ("--temperature", "-1", "--temperature is -1, not at least 0"),
            ("--top-p", "2", "--top-p is 2, not in [0, 1]"),
            ("--top-k", "-2", "--top-k is -2, not at least -1"),
        ],
    )
    def test_impossible_sampling_is_refused(self, graftrl, verl, sampling, tmp_path, option, value, fault):
        arguments = ("logs", "import", verl, "--format", "verl", "--model", "A", "--out", tmp_path / "x")
        code, _, err = graftrl(*arguments, *sampling, option, value)
        assert (code, err) == (2, f"error: {fault}\n")

    def test_two_ways_to_tell_finish_reasons_exclude_each_other(self, graftrl, verl, sampling, tmp_path):
        arguments = ("logs", "import", verl, "--format", "verl", "--model", "A", "--out", tmp_path / "x", *sampling)
        code, _, err = graftrl(*arguments, "--assume-finished", "--max-response-tokens", 5)
        assert code == 2 and "exclude each other" in err

    def test_faulty_groups_are_left_out_on_request_and_counted(self, graftrl, log, edit_file, tmp_path):
        first = pl.int_range(pl.len()) == 0
        file = log / "rollouts" / "step-000001.parquet"
        edit_file(file, pl.when(first).then(None).otherwise("reward").alias("reward"))
        (log / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 torn")
        code, out, _ = graftrl("logs", "merge", log, "--out", tmp_path / "good", "--drop-faulty")
        assert code == 0
        torn, faulty, whole = out.splitlines()
        assert torn.startswith(f"left out: {log}/rollouts/step-000002.parquet: torn")
        assert faulty == "left out: 1 faulty responses and 3 others of their groups"
        assert whole == f"{tmp_path / 'good'}: 28 responses, 2 steps"


def test_help_does_not_load_heavy_libraries():
    """`graftrl --help` must answer at once."""
    script = (
        "import sys, graftrl.cli; print(sorted({'torch', 'polars', 'transformers', 'rich.table'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "torch" not in out and "polars" not in out and "transformers" not in out
