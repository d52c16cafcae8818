"""What one local process runs on a remote host: a slot, a standby slot, `ssh.setup`, or an exec request."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import read_plan
from stoker.launchers.ssh.plan import SshPlan, command_for_attempt, records_folder
from stoker.launchers.ssh.remote_exec import RequestFolder

_SLEEP_FOREVER = Command(("sleep", "2147483647"))
RESPONSE_RECORD_INTERVAL_S = 1.0


class SlotTask:
    """One command on one host, with its identity there."""

    def __init__(self, run: RunFolder, name: str, plan: SshPlan, exec_id: str | None = None) -> None:
        """Take the name of a slot, or `setup@host`; with `exec_id`, run that exec request on the slot's host."""
        self.run, self.name, self.plan, self.exec_id = run, name, plan, exec_id
        _, _, setup_host = name.partition("@")
        self.host = setup_host or plan.hosts[name]
        self.config = plan.host_configs[self.host]
        self.attempt = int(os.environ.get("STOKER_ATTEMPT", "0"))
        self.requests = RequestFolder(run, self.attempt)
        self.is_setup = bool(setup_host)
        self.is_standby = name in plan.standby and exec_id is None
        self.is_detached = not self.is_setup and read_plan(run).detached
        self.command = self._choose_command()
        prefix = f"setup-{secrets.token_hex(3)}" if self.is_setup else Slot.parse(name).filename
        self.slot_id = f"{prefix}.{self.attempt}"
        self.folder_name = f"{self.slot_id}.{exec_id}" if exec_id else self.slot_id
        # By these variables its processes are found on the host; no process of this machine has them.
        self.tags = {"STOKER_RUN": run.id, "STOKER_SLOT": name, "STOKER_HOST": self.host}
        self.tags |= {"STOKER_ASKED": exec_id} if exec_id else {}

    @property
    def can_exec(self) -> bool:
        """Whether the slot runs commands on the hosts of standby slots."""
        return bool(self.plan.standby) and not (self.is_standby or self.exec_id or self.is_setup)

    @property
    def is_cancelled(self) -> bool:
        """Whether this is an exec request that was cancelled."""
        return self.exec_id is not None and self.requests.is_cancelled(self.name, self.exec_id)

    def _choose_command(self) -> Command:
        if self.is_setup:
            return Command(("sh", "-c", self.plan.setup or ""), {}, self.config.workdir)
        if self.exec_id is not None:
            request = self.requests.read_request(self.name, self.exec_id)
            return Command(("sh", "-c", request.command), self.plan.standby_env.get(self.name, {}), request.cwd)
        if self.is_standby:
            return _SLEEP_FOREVER
        return command_for_attempt(self.plan, Slot.parse(self.name), self.run.id, self.attempt)

    @property
    def record_path(self) -> Path | None:
        """The file of the slot's record; setup has none."""
        return None if self.is_setup else records_folder(self.run) / f"{self.folder_name}.json"

    def has_started_exec(self, exec_id: str) -> bool:
        """Whether a local process has started an exec request for this slot."""
        return not self.is_setup and (records_folder(self.run) / f"{self.slot_id}.{exec_id}.json").exists()

    def missing_secrets(self) -> list[str]:
        """List the secrets of the job that are not set in our environment."""
        return [name for name in self.plan.secrets if name not in os.environ]

    def attach_request(self, *, key: str, offset: int, can_start: bool, rsh_agent: str) -> dict[str, Any]:
        """Return the request that starts or finds the slot; secrets are sent in it, never in a command line or file."""
        secret_env = {name: os.environ[name] for name in self.plan.secrets if name in os.environ}
        run_folder = f"{self.config.workdir}/.stoker/{self.run.id}"
        env = {"STOKER_ATTEMPT": str(self.attempt), "STOKER_CHECKPOINT_DIR": f"{run_folder}/checkpoints"}
        return {
            "op": "attach",
            "folder": f"{run_folder}/{self.folder_name}",
            "key": key,
            "can_start": can_start,
            "clear_previous": self.exec_id is None,
            "offset": offset,
            "argv": self.command.argv,
            "env": {**env, **secret_env, **self.command.env},
            "cwd": self.command.cwd or self.config.workdir,
            "tags": self.tags,
            "grace_s": self.plan.grace_s,
            "lost_after_s": None if self.is_detached else self.plan.client.lost_after_s,
            "rsh_agent": rsh_agent,
        }


class HostContact:
    """Time of the last response from a host; the local processes of a detached run share it through files."""

    def __init__(self, task: SlotTask) -> None:
        self._folder, self._host, self._hosts = records_folder(task.run), task.host, tuple(task.plan.host_configs)
        self._is_shared = task.is_detached
        self.last_response = time.monotonic()
        self._last_touch = float("-inf")

    def update(self) -> None:
        """Record that the host has responded just now."""
        now = time.monotonic()
        if self._is_shared and now - self._last_touch > RESPONSE_RECORD_INTERVAL_S:
            self._file(self._host).touch()
            self._last_touch = now
        self.last_response = now

    @property
    def silence_s(self) -> float:
        """For how long the host has not responded."""
        return time.monotonic() - self.last_response

    def has_others(self, within_s: float) -> bool:
        """Whether any other host of the run responds; if not, it may be this machine that is disconnected."""
        files = (self._file(host) for host in self._hosts if host != self._host)
        return any(path.exists() and time.time() - path.stat().st_mtime < within_s for path in files)

    def _file(self, host: str) -> Path:
        return self._folder / f"heard@{host}"
