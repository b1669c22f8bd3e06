"""Launcher for torchft: starts a lighthouse and the replica groups, and starts a group again as soon as it ends.

torchft leaves starting and restarting to a launcher (torchx, Slurm). This one is as fast as a launcher can be, since it
only waits for the end of a child. `bench.recovery` and `bench.goodput` use it: `python -m bench.torchft_launcher
--lighthouse COMMAND --groups 4 --group-timeout-ms 5000 [options of the lighthouse]`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "torchft_script.py"
LIGHTHOUSE = -1
"""The lighthouse's key among the children. Replica groups have their numbers as keys."""
MAX_FAILURES = 20
"""Number of replica groups that end by themselves after which the launcher gives up. The benchmark's SIGKILLs do not count."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ended(Exception):
    """SIGTERM has come. The launcher kills its children and returns."""


def _end(*_: object) -> None:
    raise Ended


def main() -> int:
    """Run until SIGTERM, or until the lighthouse ends, which is an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.torchft_launcher", allow_abbrev=False)
    parser.add_argument("--lighthouse", required=True, help="path of the command torchft_lighthouse")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-timeout-ms", type=int, required=True, help="timeout of the groups' collectives")
    args, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, _end)
    bind = f"127.0.0.1:{free_port()}"
    common = {"TORCHFT_LIGHTHOUSE": f"http://{bind}", "NUM_REPLICA_GROUPS": str(args.groups)}
    children: dict[int, subprocess.Popen[bytes]] = {}

    def start(group: int) -> None:
        environment = {**os.environ, **common, "REPLICA_GROUP_ID": str(group)}
        children[group] = subprocess.Popen([sys.executable, str(SCRIPT), str(args.group_timeout_ms)], env=environment)

    failures = 0
    try:
        command = [sys.executable, args.lighthouse, "--bind", bind, "--min_replicas", "1", *options]
        children[LIGHTHOUSE] = subprocess.Popen(command)
        for group in range(args.groups):
            start(group)
        while failures < MAX_FAILURES:
            pid, status = os.wait()
            ended = next(name for name, child in children.items() if child.pid == pid)
            if ended == LIGHTHOUSE:
                print("The lighthouse has ended.", flush=True)
                return 1
            failures += os.waitstatus_to_exitcode(status) != -signal.SIGKILL
            print(f"Replica group {ended} has ended: it is started again.", flush=True)
            start(ended)
        print(f"{failures} replica groups have ended on their own.", flush=True)
        return 1
    except Ended:
        return 0
    finally:
        for child in children.values():
            child.kill()


if __name__ == "__main__":
    sys.exit(main())
