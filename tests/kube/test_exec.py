"""Commands in containers: what is asked for, and how their ends are read."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import AccessError, NotFoundError, UnavailableError
from stoker.kube.exec import build_exec_params, get_exit_code, to_upgrade_error

WHERE = "k8s://c/ns"


def failure(reason: str, message: str = "", **details: Any) -> dict[str, Any]:
    return {"status": "Failure", "reason": reason, "message": message, "code": 500, "details": details}


def test_every_word_of_a_command_is_a_value_of_its_own() -> None:
    asked = build_exec_params(["sh", "-c", "a & b=c"], "main", stdin=False)
    assert [value for key, value in asked if key == "command"] == ["sh", "-c", "a & b=c"]
    assert ("container", "main") in asked
    assert "stdin" not in dict(asked)
    assert dict(build_exec_params(["cat"], None, stdin=True))["stdin"] == "true"


def test_exit_codes() -> None:
    assert get_exit_code({"status": "Success"}, WHERE) == 0
    causes = [{"reason": "ExitCode", "message": "3"}]
    assert get_exit_code(failure("NonZeroExitCode", causes=causes), WHERE) == 3


def test_a_command_that_could_not_be_started_is_no_exit_code() -> None:
    said = (
        'OCI runtime exec failed: unable to start container process: exec: "nope": executable file not found in $PATH'
    )
    with pytest.raises(NotFoundError, match="there is no program 'nope' in the container"):
        get_exit_code(failure("InternalError", said), WHERE)
    with pytest.raises(UnavailableError, match="broken pipe"):
        get_exit_code(failure("InternalError", "broken pipe"), WHERE)


@pytest.mark.parametrize(("code", "kind"), [(403, AccessError), (404, NotFoundError), (400, UnavailableError)])
def test_connections_that_are_refused(code: int, kind: type[Exception]) -> None:
    error = to_upgrade_error(code, "p-0", WHERE)
    assert type(error) is kind
    assert "p-0" in str(error)
