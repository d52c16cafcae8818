import os
from pathlib import Path

from stoker.core.scratch import scratch_folder


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "a").write_text("x")
        assert os.listdir(folder) == ["a"]
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        with scratch_folder(tmp_path) as folder:
            (folder / "large").write_text("x")
            os._exit(9)
    os.waitpid(child, 0)
    (left,) = os.listdir(tmp_path)
    with scratch_folder(tmp_path) as first:
        assert left not in os.listdir(tmp_path)
        with scratch_folder(tmp_path):
            assert first.is_dir()
            assert len(os.listdir(tmp_path)) == 2
