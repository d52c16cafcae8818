"""Events on standard output, what reads them, and what they mean.

A program of yours can say that it is alive, and what it measures:

    from stoker.telemetry import recorder

    record = recorder()
    record.heartbeat(step=step)
    record.scalar("loss", loss, step)
"""

from stoker.telemetry.events import Recorder, recorder

__all__ = ["Recorder", "recorder"]
