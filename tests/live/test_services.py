"""What holds for every service, and what is the folder's alone."""

import threading

import pytest

from graftrl.errors import ConfigError
from graftrl.live.folder import SharedFolder
from graftrl.live.service import Unreachable, open_service


def test_a_step_is_there_as_published_and_replaced_when_published_again(service):
    assert service.look("A") == {} and service.fetch("A", 1) is None
    service.publish("A", 1, b"one", keep=2)
    first = service.look("A")
    assert list(first) == [1] and service.fetch("A", 1) == b"one"
    assert service.look("A") == first
    service.publish("A", 1, b"two", keep=2)
    assert service.fetch("A", 1) == b"two"
    assert list(service.look("A")) == [1] and service.look("A") != first  # heard again
    assert service.look("B") == {}


def test_only_the_last_steps_are_kept_and_steps_to_come_are_not_touched(service):
    service.publish("A", 9, b"of a run that was cut off", keep=2)
    for step in range(1, 6):
        service.publish("A", step, bytes([step]), keep=2)
    assert sorted(service.look("A")) == [4, 5, 9]
    assert service.fetch("A", 3) is None
    service.drop("A", [9, 77])
    assert sorted(service.look("A")) == [4, 5]


def test_a_folder_reads_whole_files_alone(tmp_path):
    folder = SharedFolder(tmp_path)
    folder.open()
    folder.publish("A", 1, b"one", keep=2)
    assert [file.name for file in folder.file("A", 1).parent.iterdir()] == ["step-000001.parquet"]
    for name in (".step-000002.parquet.tmp", "step-2.parquet", "step-000003.parquet.nfs", "notes.txt"):
        (folder.file("A", 1).parent / name).write_bytes(b"x")
    assert list(folder.look("A")) == [1]


def test_a_folder_that_goes_away_is_not_made_again(tmp_path):
    folder = SharedFolder(tmp_path / "share")
    folder.open()
    folder.publish("A", 1, b"one", keep=2)
    (tmp_path / "share").rename(tmp_path / "elsewhere")
    for call in (lambda: folder.look("A"), lambda: folder.fetch("A", 1), lambda: folder.publish("A", 2, b"two", 2)):
        with pytest.raises(Unreachable, match="share: the folder of the exchange cannot be used: No such file"):
            call()
    assert not (tmp_path / "share").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "share")
    assert folder.fetch("A", 1) == b"one"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable, match="cannot be used: Not a directory"):
        SharedFolder(tmp_path / "file" / "exchange").open()


def test_a_reader_never_sees_a_part_of_a_file(tmp_path):
    """The same step is published over and over while it is read."""
    folder = SharedFolder(tmp_path)
    folder.open()

    def write():
        for number in range(50):
            folder.publish("A", 1, bytes([number]) * 200_000, keep=2)

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        content = folder.fetch("A", 1)
        if content is not None:
            assert content == content[:1] * 200_000
            seen.add(content[0])
    assert len(seen) > 1


def test_ray_is_asked_for_only_where_it_is_named(tmp_path):
    assert isinstance(open_service(str(tmp_path), None), SharedFolder)
    with pytest.raises(ConfigError, match=r"ray\.address|needs the package ray"):
        open_service("ray", None)
