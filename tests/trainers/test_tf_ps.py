"""Parameter servers with real tasks: pure closures are exact whatever is lost, and waits are bounded."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import SpecError
from stoker.trainers.flags import parse_flags
from stoker.trainers.ledger import effective_samples, session_starts
from stoker.trainers.tf_flags import TF_PS
from tests.support.tf_gangs import ForkServer, assert_same_bits, read_tf_checkpoint, run_gang, start_gang
from tests.support.waiting import wait_until
from tests.trainers.test_tf_mirrored import MARGIN_S, PEER_TIMEOUT_S, START_TIMEOUT_S
from tests.trainers.test_trainer_resume import SAMPLES, assert_exactly_once

MODULE = "tf_ps"
ROLES = {"chief": 1, "worker": 2, "ps": 2}
EPOCHS = 2


@pytest.fixture(scope="module")
def ps_flags(flags: list[object]) -> list[object]:
    """13 steps per epoch, the last one of 11 samples."""
    return [*flags, "--model", "small", "--deterministic", "--ema", 0.9, "--epochs", EPOCHS]


@pytest.fixture(scope="module")
def undisturbed(tf_server: ForkServer, ps_flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing happened to."""
    folder = tmp_path_factory.mktemp("ps")
    own = [*ps_flags, "--checkpoint-dir", folder / "ck", "--ledger", folder / "ledger"]
    done = run_gang(tf_server, folder / "logs", MODULE, ROLES, *own)
    assert done.code == 0, done.text
    assert_exactly_once(folder / "ledger", EPOCHS)
    return folder


def test_a_lost_worker_joins_again_and_the_result_has_the_same_bits(
    tf_server: ForkServer, ps_flags: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    """The chief repeats what the worker has not answered; nothing else is restarted."""
    own = [*ps_flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    with start_gang(tf_server, tmp_path / "logs", MODULE, ROLES, *own, "--checkpoint-every-steps", 2) as gang:
        gang["chief-0"].wait_for('"name": "checkpoint"')
        gang["worker-1"].kill()
        gang["worker-1"].wait(30)
        gang.start("worker-1")
        done = gang["chief-0"].wait()
        assert done.code == 0, done.text
        assert gang["worker-0"].poll() is None
    assert "Traceback" not in done.text
    assert len(session_starts(tmp_path / "ledger")) == 1
    assert_exactly_once(tmp_path / "ledger", EPOCHS)
    assert_same_bits(read_tf_checkpoint(tmp_path / "ck"), read_tf_checkpoint(undisturbed / "ck"))


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("ps-1", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        pytest.param("ps-0", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_the_chief_exits_in_time_and_the_restarted_gang_has_the_same_bits(
    tf_server: ForkServer,
    ps_flags: list[object],
    undisturbed: Path,
    tmp_path: Path,
    victim: str,
    number: signal.Signals,
) -> None:
    own = [*ps_flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    own += ["--checkpoint-every-steps", 2]
    with start_gang(tf_server, tmp_path / "logs", MODULE, ROLES, *own, "--peer-timeout", PEER_TIMEOUT_S) as gang:
        gang["chief-0"].wait_for('"name": "checkpoint"')
        gang[victim].kill(number)
        lost = gang["chief-0"].wait(PEER_TIMEOUT_S + MARGIN_S)
        assert lost.code == 1, lost.text
        assert len(lost.marks("lost")) == 1
        assert "Traceback" not in lost.text
    assert run_gang(tf_server, tmp_path / "logs", MODULE, ROLES, *own).code == 0
    assert_exactly_once(tmp_path / "ledger", EPOCHS)
    assert_same_bits(read_tf_checkpoint(tmp_path / "ck"), read_tf_checkpoint(undisturbed / "ck"))


def test_the_others_exit_in_time_when_the_chief_is_stopped(
    tf_server: ForkServer, ps_flags: list[object], tmp_path: Path
) -> None:
    """The kernel still accepts connections for it."""
    own = [*ps_flags, "--epochs", 1000, "--peer-timeout", PEER_TIMEOUT_S]
    with start_gang(tf_server, tmp_path, MODULE, ROLES, *own) as gang:
        gang["chief-0"].wait_for('"name": "loss"')
        gang["chief-0"].kill(signal.SIGSTOP)
        started = time.monotonic()
        results = gang.wait("worker-0", "worker-1", "ps-0", "ps-1", timeout=PEER_TIMEOUT_S + MARGIN_S)
        assert time.monotonic() - started > PEER_TIMEOUT_S / 2
        assert {result.code for result in results.values()} == {1}
        assert all("the chief" in result.marks("lost")[0].fields["detail"] for result in results.values())


@pytest.mark.slow
def test_the_chief_exits_in_time_when_it_sends_work_to_a_stopped_worker(
    tf_server: ForkServer, ps_flags: list[object], tmp_path: Path
) -> None:
    """The worker is stopped while it has nothing to do, because the chief is stopped, too."""
    own = [*ps_flags, "--epochs", 1000, "--peer-timeout", PEER_TIMEOUT_S]
    with start_gang(tf_server, tmp_path, MODULE, ROLES, *own) as gang:
        gang["chief-0"].wait_for('"name": "loss"')
        gang["chief-0"].kill(signal.SIGSTOP)
        wait_until(lambda: is_idle(gang["worker-0"].pid))
        gang["worker-0"].kill(signal.SIGSTOP)
        gang["chief-0"].kill(signal.SIGCONT)
        lost = gang["chief-0"].wait(PEER_TIMEOUT_S + 20)
        assert lost.code == 1, lost.text
        assert len(lost.marks("lost")) == 1


def is_idle(pid: int) -> bool:
    """Whether a process uses no CPU time for a moment."""

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    time.sleep(0.5)
    return cpu_ticks() - before <= 1  # it looks for the chief now and then


def test_an_in_process_cluster_has_the_same_bits(
    tf_server: ForkServer, ps_flags: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    """On one machine, without TF_CONFIG; stopped in the middle of an epoch and resumed."""
    own = [*ps_flags, "--use-in-process-cluster", "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    for limit in (["--num-batches", 5], []):
        done = run_gang(tf_server, tmp_path / "logs", MODULE, {"chief": 1}, *own, *limit)
        assert done.code == 0, done.text
    assert_exactly_once(tmp_path / "ledger", EPOCHS)
    assert_same_bits(read_tf_checkpoint(tmp_path / "ck"), read_tf_checkpoint(undisturbed / "ck"))


def test_a_checkpoint_is_validated_without_a_cluster(
    tf_server: ForkServer, ps_flags: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    expected = read_tf_checkpoint(undisturbed / "ck")["meta"]["last"]
    own = [*ps_flags, "--eval-only", "--checkpoint-dir", undisturbed / "ck"]
    with start_gang(tf_server, tmp_path, MODULE, {"chief": 1}, *own, absent=("chief-0",)) as gang:
        done = gang.start("chief-0", TF_CONFIG="").wait()
    assert done.code == 0, done.text
    assert done.scalars("val_loss") == [pytest.approx(expected["val_loss"], rel=1e-5)]
    assert done.scalars("ema_top1") == [pytest.approx(expected["ema_top1"])]


def test_async_updates_see_every_sample(tf_server: ForkServer, ps_flags: list[object], tmp_path: Path) -> None:
    own = [*ps_flags, "--ema", 0, "--updates", "async", "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "l"]
    done = run_gang(tf_server, tmp_path / "logs", MODULE, ROLES, *own)
    assert done.code == 0, done.text
    assert {epoch: len(set(seen)) for epoch, seen in effective_samples(tmp_path / "l").items()} == {
        0: SAMPLES,
        1: SAMPLES,
    }
    state = read_tf_checkpoint(tmp_path / "ck")
    assert state["meta"]["step"] == 26
    assert any(np.abs(momentum).max() > 0 for momentum in state["momentum"].values())
    assert done.scalars("loss")[-1] < math.log(5)  # better than guessing one of five classes


def test_a_task_that_never_starts_is_named(tf_server: ForkServer, ps_flags: list[object], tmp_path: Path) -> None:
    limits = ["--start-timeout", START_TIMEOUT_S]
    with start_gang(tf_server, tmp_path, MODULE, ROLES, *ps_flags, *limits, absent=("worker-1",)) as gang:
        done = gang["chief-0"].wait(START_TIMEOUT_S + MARGIN_S)
        assert done.code == 1
        assert "worker 1" in done.marks("lost")[0].fields["detail"]
    with start_gang(tf_server, tmp_path, MODULE, ROLES, *ps_flags, *limits, absent=("chief-0", "ps-0", "ps-1")) as gang:
        for name in ("worker-0", "worker-1"):
            done = gang[name].wait(START_TIMEOUT_S + MARGIN_S)
            assert done.code == 1
            assert done.marks("lost")


def test_what_a_worker_cannot_read_is_the_error_of_the_chief(
    tf_server: ForkServer, ps_flags: list[object], tmp_path: Path
) -> None:
    """The set is on the chief, but not on the workers."""
    train = str(ps_flags[ps_flags.index("--train") + 1])
    own = [*ps_flags, "--val", ""]
    place = own.index("--train")
    del own[place : place + 2]
    names = ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1")
    with start_gang(tf_server, tmp_path / "logs", MODULE, ROLES, *own, absent=names) as gang:
        for name in names:
            gang.start(name, STOKER_DATA_TRAIN=train if name == "chief-0" else str(tmp_path / "none"))
        done = gang["chief-0"].wait()
    assert done.code == 2, done.text
    (line,) = [line for line in done.text.splitlines() if line.startswith("error: ")]
    assert str(tmp_path / "none") in line
    assert "Traceback" not in done.text


def test_a_process_without_a_cluster_is_rejected(tf_server: ForkServer, ps_flags: list[object], tmp_path: Path) -> None:
    with start_gang(tf_server, tmp_path, MODULE, {"chief": 1}, *ps_flags, absent=("chief-0",)) as gang:
        done = gang.start("chief-0", TF_CONFIG="").wait()
        assert done.code == 2
        assert "TF_CONFIG" in done.text
        done = gang.start("chief-0").wait()
        assert done.code == 2
        assert "no worker" in done.text


def test_flags_that_do_not_fit_are_rejected() -> None:
    words = ["--train", "x", "--val", "x", "--updates", "async", "--ema", "0.9"]
    with pytest.raises(SpecError) as caught:
        parse_flags(words, {}, TF_PS)
    assert [fault.path for fault in caught.value.faults] == ["--ema"]
