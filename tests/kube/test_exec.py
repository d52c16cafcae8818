"""Exec: query parameters, exit codes, and errors of commands that could not be started."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import AccessDeniedError, NotFoundError, UnavailableError
from stoker.kube.exec import build_exec_params, get_exit_code, to_upgrade_error

WHERE = "k8s://c/ns"


def failure(reason: str, message: str = "", **details: Any) -> dict[str, Any]:
    return {"status": "Failure", "reason": reason, "message": message, "code": 500, "details": details}


def test_every_argument_is_a_query_parameter_of_its_own() -> None:
    params = build_exec_params(["sh", "-c", "a & b=c"], "main", stdin=False)
    assert [value for key, value in params if key == "command"] == ["sh", "-c", "a & b=c"]
    assert ("container", "main") in params
    assert "stdin" not in dict(params)
    assert dict(build_exec_params(["cat"], None, stdin=True))["stdin"] == "true"


def test_get_exit_code() -> None:
    assert get_exit_code({"status": "Success"}, WHERE) == 0
    causes = [{"reason": "ExitCode", "message": "3"}]
    assert get_exit_code(failure("NonZeroExitCode", causes=causes), WHERE) == 3


def test_get_exit_code_raises_if_the_command_did_not_start() -> None:
    message = (
        'OCI runtime exec failed: unable to start container process: exec: "nope": executable file not found in $PATH'
    )
    with pytest.raises(NotFoundError, match="program 'nope' not found") as caught:
        get_exit_code(failure("InternalError", message), WHERE)
    assert caught.value.where == WHERE
    with pytest.raises(UnavailableError, match="broken pipe"):
        get_exit_code(failure("InternalError", "broken pipe"), WHERE)


@pytest.mark.parametrize(("code", "kind"), [(403, AccessDeniedError), (404, NotFoundError), (400, UnavailableError)])
def test_failed_upgrade_names_the_pod(code: int, kind: type[Exception]) -> None:
    error = to_upgrade_error(code, "p-0", WHERE)
    assert type(error) is kind
    assert "p-0" in str(error)
