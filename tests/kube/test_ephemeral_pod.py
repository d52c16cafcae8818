"""Pods of visits: what stays behind is removed, and what is not ours or still runs is not."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from stoker.errors import AccessError, ConflictError, UnavailableError
from stoker.kube.ephemeral_pod import delete_finished, ephemeral_pod

POD = {"metadata": {"name": "look"}}


def test_only_visits_that_are_over_are_swept() -> None:
    def pod(name: str, phase: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never"}, "status": {"phase": phase}}

    cluster = MagicMock()
    cluster.delete.side_effect = AccessError("you may not")
    delete_finished([pod("over", "Failed"), pod("now", "Running"), pod("done", "Succeeded")], cluster)
    assert [call.args[1] for call in cluster.delete.call_args_list] == ["over", "done"]


@pytest.mark.parametrize(
    ("error", "is_deleted"), [(UnavailableError("no answer came"), True), (ConflictError("is there already"), False)]
)
def test_a_pod_that_may_have_been_made_is_deleted_and_one_of_others_is_not(error: Exception, is_deleted: bool) -> None:
    cluster = MagicMock()
    cluster.create.side_effect, cluster.get.return_value = error, None
    with pytest.raises(type(error)), ephemeral_pod(cluster, POD, wait_s=1, report=print):
        pass
    assert cluster.delete.called is is_deleted
