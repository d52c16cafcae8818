import os
from pathlib import Path

from stoker.core.scratch import scratch_directory


def test_directory_is_removed_on_exit(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as folder:
        (folder / "a").write_text("x")
        assert os.listdir(folder) == ["a"]
    assert os.listdir(tmp_path) == []


def test_directory_of_a_killed_process_is_removed_and_that_of_a_running_one_is_kept(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        with scratch_directory(tmp_path) as folder:
            (folder / "large").write_text("x")
            os._exit(9)
    os.waitpid(child, 0)
    (stale,) = os.listdir(tmp_path)
    with scratch_directory(tmp_path) as first:
        assert stale not in os.listdir(tmp_path)
        with scratch_directory(tmp_path):
            assert first.is_dir()
            assert len(os.listdir(tmp_path)) == 2
