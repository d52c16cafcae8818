"""Runs one command and prints its wall seconds and the peak resident bytes of its largest process.

A process of its own, because Linux counts what a parent holds at the fork as its child's peak: this one holds
next to nothing, while the benchmark itself has imported the peers.
"""

import os
import resource
import sys
import time


def main() -> int:
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    start = time.perf_counter()
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
    _, status = os.waitpid(child, 0)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(seconds, peak)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
