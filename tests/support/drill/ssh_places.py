"""Places of a drill on ssh hosts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.support.drill.faults import (
    Fault,
    find_programs,
    find_ranks,
    find_torchrun,
    killer,
    tagged_commands,
)
from tests.support.drill.place import Place
from tests.support.hosts import Host, Network
from tests.support.ssh_runs import (
    Machine,
    attach_sessions,
    find_by_command,
    guards,
    slot_daemons,
    slot_processes,
    ssh_section,
    supervisors,
)
from tests.support.waiting import wait_until

OUTAGE_S = 10
LOST_AFTER_S = 5


def find_ssh(run: RunFolder) -> list[int]:
    """The ssh processes on the launching machine."""
    return find_by_command(f"stoker-agent-{run.id}", "ssh")


class SshPlace(Place):
    """Two ssh hosts; by seed attached or detached, and with a short or a long time until a host is lost."""

    on = "ssh"
    topology = "torchrun"

    def __init__(self, draw: random.Random, net: Network) -> None:
        super().__init__(draw)
        self.net = net
        self.detach = draw.random() < 0.3
        # Slots of a detached run have no lease: on a host that is cut off for good, they would run forever.
        self.lost_after_s = OUTAGE_S + 20 if self.detach else draw.choice([LOST_AFTER_S, OUTAGE_S + 20])
        self.may_lose_more_attempts = self.lost_after_s < OUTAGE_S

    def resume(self, run: RunFolder, launching: Machine) -> None:
        """Resume the run attached; a detached one is continued by any command."""
        if self.detach:
            done = launching.run("job", "status", run.id)
            assert done.returncode == 0, done.stderr
        else:
            launching.start("job", "run", "--resume", run.id)
            wait_until(lambda: supervisor_pid(run) is not None)

    def job_keys(self, folder: Path) -> dict[str, Any]:
        ssh = ssh_section(self.net, folder / "there", lost_after=self.lost_after_s)
        return {"topology": self.topology, "ssh": ssh}

    def faults(self) -> Sequence[Fault]:
        connection = [
            Fault("ssh", self.one_of(find_ssh), 3, ends_attempt=False),
            Fault("sshd session", self.one_of(self.find_sessions), 3, ends_attempt=False),
            Fault("attach session", self.one_of(attach_sessions), 2, ends_attempt=False),
        ]
        daemons = [
            Fault("slot daemon", self.one_of(slot_daemons), 2, cuts_logs=True),
            Fault("guard", self.one_of(guards), 2, cuts_logs=True),
        ]
        ours = Fault("all but the slots", self.all_but_the_slots, 2, ends_supervisor=True, cuts_logs=True)
        reboot = Fault("host rebooted", self.reboot, 1, cuts_logs=True)
        return [*self.common_faults(), *self.program_faults(), *connection, *daemons, self.outage(), ours, reboot]

    def program_faults(self) -> list[Fault]:
        return [Fault("torchrun", self.one_of(find_torchrun), 2)]

    def common_faults(self) -> list[Fault]:
        faults = super().common_faults()
        if not self.detach:
            return faults
        reattach = Fault("supervisor", killer(supervisors), 6, ends_attempt=False, ends_supervisor=True)
        return [reattach, *(fault for fault in faults if not fault.ends_supervisor)]

    def find_sessions(self, run: RunFolder) -> list[int]:
        return [pid for host in self.net.hosts for pid in host.sessions()] if attach_sessions(run) else []

    def everything(self, run: RunFolder) -> bool:
        return bool(ours := self.find_ours(run)) and self.kill_shuffled(
            [*ours, *(pid for pid, _ in tagged_commands(run))]
        )

    def all_but_the_slots(self, run: RunFolder) -> bool:
        """Kill all processes of Stoker and ssh at once; nothing but their death tells the slots to stop."""
        is_hit = bool(find_ranks(run) and (ours := self.find_ours(run))) and self.kill_shuffled(ours)
        if is_hit:
            wait_until(lambda: not find_ranks(run))
        return is_hit

    def find_ours(self, run: RunFolder) -> list[int]:
        """All processes of Stoker and ssh, if the run has a supervisor and slot daemons."""
        watching, daemons = supervisors(run), slot_daemons(run)
        others = [*guards(run), *attach_sessions(run), *self.find_sessions(run), *find_ssh(run)]
        return [*watching, *daemons, *others] if watching and daemons else []

    def outage(self) -> Fault:
        """A host without network: shorter than `lost_after`, which changes nothing, or until its slots have stopped."""
        if self.lost_after_s > OUTAGE_S:
            return Fault(
                f"cut off for {OUTAGE_S} s", self.cut_off_for_a_while, 2, ends_attempt=False, needs_training=True
            )
        return Fault("cut off for good", self.cut_off_for_good, 2, cuts_logs=True, needs_training=True)

    def cut_off_for_a_while(self, run: RunFolder) -> bool:
        if host := self.draw_host(run):
            host.disconnect()
            time.sleep(OUTAGE_S)
            host.reconnect()
        return host is not None

    def cut_off_for_good(self, run: RunFolder) -> bool:
        if host := self.draw_host(run):
            host.disconnect()
            try:
                wait_until(lambda: not slot_processes(run, host.name))
                time.sleep(self.draw.uniform(0, 3))
            finally:
                host.reconnect()
        return host is not None

    def reboot(self, run: RunFolder) -> bool:
        if host := self.draw_host(run):
            host.down()
            host.up()
        return host is not None

    def draw_host(self, run: RunFolder) -> Host | None:
        """Draw a host, as soon as slots run on all of them."""
        is_running = all(slot_processes(run, host.name) for host in self.net.hosts)
        return self.draw.choice(self.net.hosts) if is_running else None


class SshMpiPlace(SshPlace):
    """mpirun over ssh hosts that cannot log in to each other."""

    topology = "mpi"

    def program_faults(self) -> list[Fault]:
        names = ("mpirun", "orted")
        return [Fault(name, self.one_of(partial(find_programs, name=name)), 2, cuts_logs=True) for name in names]
