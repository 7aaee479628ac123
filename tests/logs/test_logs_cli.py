"""`graftrl logs` as a user meets it: what is printed, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import polars as pl


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


def test_help_does_not_load_heavy_libraries():
    """`graftrl --help` must answer at once."""
    script = (
        "import sys, graftrl.cli; print(sorted({'torch', 'polars', 'transformers', 'rich.table'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "torch" not in out and "polars" not in out and "transformers" not in out
