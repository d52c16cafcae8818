"""Telemetry: events on standard output, their readers, and their analysis.

A program reports that it is alive, and what it measures, through a recorder:

    from stoker.telemetry import recorder

    record = recorder()
    record.heartbeat(step=step)
    record.scalar("loss", loss, step)
"""

from stoker.telemetry.events import Recorder, recorder

__all__ = ["Recorder", "recorder"]
