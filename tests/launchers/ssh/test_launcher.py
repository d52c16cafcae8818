"""The ssh launcher: the launcher contract, uploads, preflight errors and commands, on hosts with a real sshd."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.spec import decode
from stoker.errors import InputError, SpecError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import RunFolder, create_run, find_run
from stoker.jobs.spec import JobSpec, SshSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ssh.client import NO_PYTHON_CODE, SshClient, explain_failure, format_failure
from tests.launchers.contract import LauncherSuite, is_ready, job_of
from tests.support.hosts import Network
from tests.support.ssh_runs import find_by_command, remote_processes, ssh_section, write_ssh_job
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "at", os.environ["MASTER_ADDR"], os.environ["STOKER_HOST"])
dist.destroy_process_group()
"""


class TestSsh(LauncherSuite):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.workdir = net, tmp_path / "there"

    def start(self, launcher: Any, job: JobSpec) -> RunFolder:
        if not job.ssh.hosts:
            job = msgspec.structs.replace(job, ssh=decode(ssh_section(self.net, self.workdir), SshSpec))
        return super().start(launcher, job)

    def start_rendered(self, launcher: Any, job: JobSpec, rendered: Any) -> RunFolder:
        run = create_run(job, rendered)
        launcher.start(rendered, run)
        self.started.append((launcher, run))
        return run

    def test_all_reduce_between_two_hosts(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.run_to_end(launcher, job_of(**keys), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        first = self.net["node1"].address
        for index, host in enumerate(("node1", "node2")):
            assert f"sum 3.0 of 2 at {first} {host}" in self.text(launcher, run, Slot("worker", index))
        plan = json.loads((run.folder / "plan.json").read_text())
        for index, host in enumerate(("node1", "node2")):
            assert plan["slots"][f"worker/{index}"]["env"]["GLOO_SOCKET_IFNAME"] == self.net[host].interface
        assert remote_processes(run) == []

    def test_missing_program_is_not_retried(self, launcher: Any) -> None:
        keys = {"program": {"command": ["./no-such-program"]}, "retries": 2}
        _, status = self.run_to_end(launcher, job_of(**keys))
        for word in ("worker/0", "node1", "'./no-such-program'", "No such file or directory"):
            assert word in status.message
        assert len(status.attempts) == 1

    def test_secrets_are_in_no_command_line_and_no_file(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        script = f"echo ready ${{#TOKEN}}; while ! test -e {tmp_path}/go; do sleep 0.05; done"
        run = self.start(launcher, job_of(script, secret_env={"TOKEN": {"secret": "s", "key": "k"}}))
        wait_until(lambda: "ready 14" in self.text(launcher, run))
        assert not find_by_command("hush-hush-hush", "")
        (tmp_path / "go").touch()
        wait_until(lambda: launcher.status(run.handle).state is JobState.SUCCEEDED)
        files = [path for path in (*run.folder.rglob("*"), *self.workdir.rglob("*")) if path.is_file()]
        assert not any(b"hush-hush-hush" in path.read_bytes() for path in files)

    @pytest.mark.parametrize("method", ["rsync", "archive"])
    def test_upload_respects_ignore_file_and_deletes_nothing(self, method: str, launcher: Any, tmp_path: Path) -> None:
        for name in ("keep.txt", "skip.bin", "deep/in/a.txt", "deep/skip.bin", "data/big.tar", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "run.sh").write_text("#!/bin/sh\ncat made")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / "link").symlink_to("keep.txt")
        (tmp_path / ".stokerignore").write_text("# large\n*.bin\n/data/\nthere*/\n!deep/skip.bin\n")
        uploaded = {".stokerignore", "deep/in/a.txt", "deep/skip.bin", "keep.txt", "link", "run.sh"}
        workdir = tmp_path / f"there, {method}"
        workdir.mkdir()
        (workdir / "foreign").write_text("of someone else")
        section = ssh_section(self.net, workdir, "node1", setup="echo setup; cp keep.txt made", exclude=["there*"])
        job = job_of(program={"command": ["./run.sh"]}, ssh=section)
        rendered = launcher.render(job)
        if method == "archive":
            rendered = without_rsync(rendered)
        assert f"{len(uploaded)} files" in rendered.notes[0]
        run = self.start_rendered(launcher, job, rendered)
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        files = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if not path.is_dir()}
        assert files == uploaded | {"foreign", "made"}
        assert self.text(launcher, run) == ["keep.txt"]
        assert (run.folder / "setup.node1.log").read_text() == "setup\n"
        assert (workdir / "link").is_symlink()

    def test_failed_setup_fails_the_run(self, launcher: Any) -> None:
        setup = "echo 'no such package' >&2; exit 9"
        job = job_of("true", ssh=ssh_section(self.net, self.workdir, "node1", setup=setup))
        rendered = launcher.render(job)
        with pytest.raises(InputError, match=r"ssh\.setup .*\b9\b.*no such package.*setup\.node1\.log") as caught:
            self.start_rendered(launcher, job, rendered)
        assert caught.value.where == "node1"
        run = find_run("small")
        assert launcher.status(run.handle).state is JobState.FAILED

    def test_profiler_is_uploaded_to_hosts_without_stoker(self, launcher: Any, tmp_path: Path) -> None:
        section = ssh_section(self.net, self.workdir, "node1", python=str(bare_python(tmp_path)))
        run, status = self.run_to_end(launcher, job_of("sleep 1.5", profile={"every": 1}, ssh=section))
        assert status.state is JobState.SUCCEEDED, status.message
        assert '"k": "profile"' in run.log_path(Slot("worker", 0), 0).read_text()

    def test_local_faults_are_reported_without_connecting(self, launcher: Any) -> None:
        keys = {"program": {"script": "no.py"}, "topology": "torchrun", "workers": 3}
        with pytest.raises(SpecError, match=r"\b3\b.*\b2\b") as caught:
            launcher.render(job_of(**keys, ssh={"hosts": ["a", "b"]}))
        assert [fault.path for fault in caught.value.faults] == ["ssh.hosts", "program.script"]

    def test_all_issues_of_all_hosts_are_reported_at_once(self, launcher: Any, tmp_path: Path) -> None:
        config = write_broken_hosts(self.net, tmp_path)
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 8}
        hosts = ["node1", "no-such-host", "refusing", "keyless", "changed", "new", "bare", "absent"]
        section = ssh_section(self.net, tmp_path / "plain" / "x", *hosts, config=str(config), python="python3")
        (tmp_path / "plain").write_text("not a directory")
        with pytest.raises(UnavailableError) as caught:
            launcher.render(job_of(**keys, ssh=section))
        message = str(caught.value)
        assert "0 of 8 hosts are ready" in message
        client = SshClient(config=str(config))
        for host, stderr in {
            "no-such-host": "Could not resolve hostname no-such-host",
            "refusing": "Connection refused",
            "keyless": "Permission denied",
            "changed": "REMOTE HOST IDENTIFICATION HAS CHANGED",
        }.items():
            assert f"{host}: {explain_failure(client, host, stderr, 255)[0]}" in message
        assert f"bare: {format_failure(client, 'bare', '', NO_PYTHON_CODE)}" in message
        assert f"new: {format_failure(client, 'new', 'Host key verification failed', 255)}" in message
        assert f"ssh -F {config} new" in message
        timeouts = [explain_failure(client, "absent", stderr, 255)[0] for stderr in ("timed out", "No route to host")]
        assert any(f"absent: {timeout}" in message for timeout in timeouts)
        assert f"node1: cannot use the directory {tmp_path}/plain/x: {tmp_path}/plain " in message
        assert not Path(os.environ["STOKER_HOME"]).exists()

    def test_one_of_three_hosts_is_down(self, launcher: Any, tmp_path: Path) -> None:
        config = tmp_path / "config"
        address = f"{self.net['node1'].address.rpartition('.')[0]}.201"
        config.write_text(f"Include {self.net.config}\nHost node3\n  HostName {address}\n")
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 3}
        section = ssh_section(self.net, self.workdir, "node1", "node2", "node3", config=str(config))
        with pytest.raises(UnavailableError, match=r"2 of 3 hosts.*; node3: (connection timed|no response|no route)"):
            launcher.render(job_of(**keys, ssh=section))

    def test_missing_torch_or_python_on_hosts(self, launcher: Any, tmp_path: Path) -> None:
        python = bare_python(tmp_path)
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 2}
        with pytest.raises(InputError, match=r"0 of 2 hosts.*; node1, node2: .*\btorch\b") as caught:
            launcher.render(job_of(**keys, ssh=ssh_section(self.net, self.workdir, python=str(python))))
        assert caught.value.where == "job 'small' on ssh"
        with pytest.raises(InputError, match=r"node1, node2: .*'python9'.*No such file.*ssh\.python"):
            launcher.render(job_of(**keys, ssh=ssh_section(self.net, self.workdir, python="python9")))

    def test_port_in_use(self, launcher: Any) -> None:
        """A port that the job sets is an error; otherwise the next free one is used."""
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 2}
        serve = "import socket, time; s = socket.create_server(('', 29500)); print(flush=True); time.sleep(99)"
        argv = ["ip", "netns", "exec", self.net["node1"].namespace, sys.executable, "-c", serve]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            try:
                with pytest.raises(InputError, match=r"node1: .*\b29500\b.*address already in use.*--set port="):
                    launcher.render(job_of(**keys, port=29500, ssh=ssh_section(self.net, self.workdir)))
                plan = launcher.render(job_of(**keys, ssh=ssh_section(self.net, self.workdir)))
                assert plan.port == 29501
                assert all("29501" in command.argv for command in plan.slots.values())
            finally:
                server.kill()


def without_rsync(plan: Any) -> Any:
    """The plan for hosts without rsync."""
    configs = {host: msgspec.structs.replace(config, rsync=False) for host, config in plan.host_configs.items()}
    return msgspec.structs.replace(plan, host_configs=configs)


def bare_python(folder: Path) -> Path:
    """A Python without any package."""
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    path.chmod(0o755)
    return path


def write_broken_hosts(net: Network, folder: Path) -> Path:
    """Write an ssh config with hosts that cannot be used, each for another reason."""
    address, keys = net["node1"].address, net.folder
    other_key = " ".join((keys / "other.pub").read_text().split()[:2])
    (folder / "changed").write_text(f"{address} {other_key}\n")
    (folder / "none").write_text("")
    (folder / "bin").mkdir()
    (folder / "bin" / "sh").symlink_to("/bin/sh")
    command = f'command="env PATH={folder}/bin sh -c \\"$SSH_ORIGINAL_COMMAND\\""'
    authorized = (keys / "user.pub").read_text()
    if not (keys / "limited").exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "limited")]
        subprocess.run(argv, check=True)
    (keys / "authorized").write_text(f"{authorized}{command} {(keys / 'limited.pub').read_text()}")
    known = keys / "known"
    rows = {
        "node1": (address, keys / "user", known, 22),
        "refusing": (address, keys / "user", known, 2222),
        "keyless": (address, keys / "stranger", known, 22),
        "changed": (address, keys / "user", folder / "changed", 22),
        "new": (address, keys / "user", folder / "none", 22),
        "bare": (address, keys / "limited", known, 22),
        "absent": (f"{address.rpartition('.')[0]}.200", keys / "user", known, 22),
    }
    text = [
        f"Host {name}\n  HostName {host_name}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known}\n  Port {port}\n"
        for name, (host_name, key, known, port) in rows.items()
    ]
    (folder / "broken").write_text("".join(text))
    return folder / "broken"


# --- Commands


def test_commands_from_another_shell(net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    job = write_ssh_job(net, workspace, script)
    assert stoker("job", "plan", job, "--on", "ssh", "--hosts", "node1:2") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"# worker/0 on node1\ncd {workspace}/there && ")
    assert all(word in err for word in ("0 files (0 B)", f"{workspace}/work", f"node1:{workspace}/there"))
    assert not (workspace / "there").exists()
    assert stoker("job", "run", job, "--on", "ssh", "--hosts", "node1", "--detach") == 0
    run = find_run("small")
    assert run.handle == f"ssh://{run.folder}"
    wait_until(lambda: is_ready(run))
    capsys.readouterr()
    assert stoker("job", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert stoker("job", "stop") == 0
    capsys.readouterr()
    assert stoker("job", "logs") == 0
    assert capsys.readouterr().out == "ready\nsaved\n"
    assert remote_processes(run) == []
    assert stoker("job", "run", "--resume", run.id, "--detach") == 0
    wait_until(lambda: run.log_path(Slot("worker", 0), 1).exists() or run.read_status().state is JobState.RUNNING)
    assert LAUNCHERS.get("ssh")().status(run.handle).state is JobState.RUNNING
    assert stoker("job", "stop") == 0


def test_every_named_host_runs_a_worker(net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_ssh_job(net, workspace, "true", topology="mpi", program={"command": ["hostname"]})
    for hosts, places in (("node1,node2", ["node1", "node2"]), ("node2,node1:2", ["node2", "node1", "node1"])):
        assert stoker("job", "plan", job, "--on", "ssh", "--hosts", hosts, "--json") == 0
        assigned = json.loads(capsys.readouterr().out)["hosts"]
        assert [host for slot, host in assigned.items() if slot.startswith("worker/")] == places


def test_single_process_uses_the_first_host_and_names_the_others(
    net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_ssh_job(net, workspace, "true")
    assert stoker("job", "plan", job, "--on", "ssh", "--hosts", "node1,node2") == 0
    out, err = capsys.readouterr()
    assert out.startswith("# worker/0 on node1\n")
    assert "node2" in err


def test_unknown_host_exits_5_with_one_sentence(
    net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_ssh_job(net, workspace, "true")
    assert stoker("job", "run", job, "--on", "ssh", "--hosts", "no-such-host") == UnavailableError.exit_code == 5
    err = capsys.readouterr().err
    unknown, _ = explain_failure(SshClient(), "no-such-host", "Could not resolve hostname no-such-host", 255)
    assert re.search(rf"no-such-host: {re.escape(unknown)} \(", err)
    assert err.count("\n") == 1
