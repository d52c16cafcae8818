"""Run one command and print its wall time in seconds and the peak resident bytes of its largest process.

This is a separate process because Linux counts the memory of the parent at the fork toward the peak of the child, and
the benchmark itself has imported the peers.
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
