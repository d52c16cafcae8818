"""What a launch costs: a job of two ranks that do nothing, under stoker and under bare torchrun."""

from __future__ import annotations

import json
import shutil
import statistics
import sys

from measure import STOKER, Contestant, Lab, Limit, Result, Versus, command, take_turns

OURS, BARE = "stoker job run", "torchrun"


def run(lab: Lab) -> Result:
    folder = lab.work / "launch"
    folder.mkdir()
    (folder / "nothing.py").write_text("")
    program = {"script": str(folder / "nothing.py")}
    (folder / "job.yaml").write_text(json.dumps({"name": "nothing", "program": program, "processes_per_worker": 2}))
    home = folder / "home"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    contestants = [
        Contestant(
            name=OURS,
            act=lambda: command("env", f"STOKER_HOME={home}", STOKER, "job", "run", folder / "job.yaml"),
            clean=lambda: shutil.rmtree(home, ignore_errors=True),
            ours=True,
        ),
        Contestant(name=BARE, act=lambda: command(*torchrun, folder / "nothing.py")),
    ]
    speeds, _ = take_turns(contestants, lab.rounds, 60)
    helps = [command(STOKER, "--help").seconds for _ in range(lab.rounds + 1)][1:]
    added = [60 / ours - 60 / bare for ours, bare in zip(speeds[OURS], speeds[BARE], strict=True)]
    return Result(
        name="launch",
        title="Launching two ranks that do nothing",
        unit="launches/minute",
        contestants=contestants,
        speeds=speeds,
        versus=[Versus(ours=OURS, peer=BARE)],
        limits=[
            Limit(what="Added by stoker", value=1000 * statistics.median(added), bound=1000, unit="ms"),
            Limit(what="`stoker --help`", value=1000 * statistics.median(helps), bound=300, unit="ms"),
        ],
        notes=["From the command to the shell's next prompt: supervisor, profiler and run folder included."],
    )
