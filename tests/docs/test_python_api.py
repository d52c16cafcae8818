"""Execute docs/python-api.md: its `bash` blocks, then its `python` blocks as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs.test_commands import bash_script
from tests.support.paths import DOCS

PAGE = DOCS / "python-api.md"


def test_code_of_the_page_runs(tmp_path: Path, stoker_home: Path) -> None:
    subprocess.run(["bash", "-euc", bash_script(PAGE)], cwd=tmp_path, check=True)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    argv = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in ("[worker/0] trained", "succeeded", "stopped", f"{3} {1 / 3}"):
        assert line in lines
    failures = [line for line in lines if "worker/0" in line and "exit" in line]
    assert failures, done.stdout
