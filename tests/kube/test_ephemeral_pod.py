"""Ephemeral pods: ours are deleted, also after an unclear failure; those of others and running ones are not."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from stoker.errors import AccessDeniedError, ConflictError, UnavailableError
from stoker.kube.ephemeral_pod import delete_finished, ephemeral_pod

POD = {"metadata": {"name": "inspect-data"}}


def test_delete_finished_keeps_running_pods() -> None:
    def pod(name: str, phase: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never"}, "status": {"phase": phase}}

    client = MagicMock()
    client.delete.side_effect = AccessDeniedError("denied")
    delete_finished([pod("failed", "Failed"), pod("running", "Running"), pod("done", "Succeeded")], client)
    assert [call.args[1] for call in client.delete.call_args_list] == ["failed", "done"]


@pytest.mark.parametrize(
    ("error", "is_deleted"), [(UnavailableError("connection lost"), True), (ConflictError("already exists"), False)]
)
def test_pod_is_deleted_unless_the_server_rejected_it(error: Exception, is_deleted: bool) -> None:
    client = MagicMock()
    client.create.side_effect, client.get.return_value = error, None
    with pytest.raises(type(error)), ephemeral_pod(client, POD, wait_s=1, report=print):
        pass
    assert client.delete.called is is_deleted
