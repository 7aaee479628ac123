"""Chunks, the record of a folder, and what people see of the progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from graftrl import chunks
from graftrl.chunks import Record, chunk_sizes, fill, model_files, shown, told_where
from graftrl.errors import RunError

RECORD = Record("thing", "a thing")


def test_chunk_sizes():
    assert chunk_sizes(10, 4) == [4, 4, 2] and chunk_sizes(8, 4) == [4, 4] and chunk_sizes(0, 4) == []


def test_only_chunks_that_lack_prompts_are_answered():
    answered: list[tuple[int, int]] = []
    progress: list[tuple[int, int]] = []
    fill([4, 4, 2], [4, 3, 0].__getitem__, lambda *chunk: answered.append(chunk), lambda *done: progress.append(done))
    assert answered == [(1, 4), (2, 2)] and progress == [(4, 10), (8, 10), (10, 10)]


def test_a_record_comes_back_and_another_question_is_named(tmp_path):
    asked = {"seed": 1, "models": {"A": {"path": "x", "stops": ["\n"]}}}
    assert RECORD.read(tmp_path) is None
    RECORD.write(tmp_path, asked, {"A": [["f", 3, 4]]})
    held, files = RECORD.read(tmp_path) or ({}, {})
    assert (held, files) == (asked, {"A": [["f", 3, 4]]})
    RECORD.refuse_other(tmp_path, held, asked)
    with pytest.raises(RunError, match=r"holds a thing with another models\.A\.path \('x' there, 'y' here\)"):
        RECORD.refuse_other(tmp_path, held, {"seed": 1, "models": {"A": {"path": "y", "stops": ["\n"]}}})
    with pytest.raises(RunError, match=r"another models\.B \(None there"):
        RECORD.refuse_other(tmp_path, held, {**asked, "models": {**asked["models"], "B": {}}})
    RECORD.refuse_changed(tmp_path, files, {"A": [["f", 3, 4]], "B": [["g", 1, 1]]})
    with pytest.raises(RunError, match="files of model 'A' have changed"):
        RECORD.refuse_changed(tmp_path, files, {"A": [["f", 3, 5]]})


@pytest.mark.parametrize("content", ["[1, 2", "x: 1", "[]", "thing: 3\nweights: {}", "\xff"])
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    (tmp_path / "thing.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match="not what a thing writes"):
        RECORD.read(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(RunError, match="something else than a thing"):
        RECORD.read(tmp_path)


def test_files_of_a_folder_a_file_and_a_hub_id(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"123")
    (tmp_path / "config.json").write_text("{}")
    ((name, size, _),) = model_files(str(tmp_path))
    assert (name, size) == ("model.safetensors", 3)
    (tmp_path / "m.gguf").write_bytes(b"12345")
    assert model_files(str(tmp_path / "m.gguf"))[0][:2] == ["m.gguf", 5]
    assert model_files("some/hub-id") == []


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch):
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(chunks.time, "monotonic", lambda: next(times))
    console = Console(file=io.StringIO(), width=80)
    with shown("problems", console) as progress:
        for done in (1, 2, 3):
            progress(done, 9)
    assert console.file.getvalue() == "2 of 9 problems\n"


def test_an_interruption_says_where_the_work_is(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt), told_where(tmp_path, "problems"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == (
        f"{tmp_path} keeps the problems that were finished; the same command goes on from there\n"
    )
