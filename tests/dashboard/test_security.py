"""Who may read the dashboard, and what its pages may load."""

from __future__ import annotations

import pytest

from stoker.dashboard.security import COOKIE
from stoker.jobs.run_folder import RunFolder
from stoker.serve.loopback import is_loopback
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.trees import stoker

TOKEN = "0123456789abcdef0123"


def test_token_is_required_everywhere(run: RunFolder) -> None:
    with running_dashboard(token=TOKEN) as dashboard:
        for path in (
            "/",
            "/api/runs",
            "/metrics",
            "/static/main.js",
            "/api/openapi.json",
            f"/api/runs/{run.id}/stream",
        ):
            assert dashboard.get(path).code == 401, path
            assert dashboard.get(path, {"Authorization": f"Bearer {TOKEN}x"}).code == 401
            assert dashboard.get(path, {"Cookie": f"{COOKIE}={TOKEN}"}).code == 401
        assert dashboard.get("/api/runs", {"Authorization": f"Bearer {TOKEN}"}).code == 200


def test_link_works_once(run: RunFolder) -> None:
    with running_dashboard(token=TOKEN) as dashboard:
        key = dashboard.access.link_key
        assert dashboard.get("/login?key=wrong").code == 403
        answer = dashboard.get(f"/login?key={key}")
        assert (answer.code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert dashboard.get("/api/runs", {"Cookie": cookie.partition(";")[0]}).code == 200
        assert dashboard.get(f"/login?key={key}").code == 403


def test_every_response_has_the_security_headers(dashboard: Dashboard) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing", "/api/runs/nothing", "/api/compare"):
        headers = dashboard.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(("host", "code"), [("evil.example", 421), ("localhost:8300", 200), ("127.0.0.1", 200)])
def test_names_of_other_sites_are_refused_on_loopback(dashboard: Dashboard, host: str, code: int) -> None:
    """A page of another site may point its own name at this address (DNS rebinding)."""
    assert dashboard.get("/api/runs", {"Host": host}).code == code


def test_other_addresses_require_a_token(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("dash", "--host", "0.0.0.0", "--port", "0") == 2
    assert "--token-file" in capsys.readouterr().err
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [
        True, True, True, False, False
    ]  # fmt: skip


def test_page_loads_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    page = dashboard.get("/").body.decode()
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert "https:" not in page
    assert "<script>" not in page
    assert " style=" not in page
