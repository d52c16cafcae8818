"""The Slurm launcher on a real controller with two nodes."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.launchers.slurm.launcher import SlurmLauncher
from tests.launchers.contract import LauncherSuite
from tests.support.slurm import SlurmTestCluster

pytestmark = pytest.mark.timeout(240)


class TestSlurm(LauncherSuite):
    ON = "slurm"

    @pytest.fixture
    def launcher(self, cluster: SlurmTestCluster) -> Any:
        self.cluster = cluster
        return SlurmLauncher()
