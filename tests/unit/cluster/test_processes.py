"""Processes are known by pid and start time; only what was recorded is stopped."""

import os
import subprocess
import sys
from pathlib import Path

from cluster import processes
from cluster.processes import Process
from harness.polling import until


def test_spawned_process_is_found_and_stopped(tmp_path: Path) -> None:
    spawned = processes.spawn(tmp_path, "sleeper", ["sleep", "60"])
    assert processes.recorded(tmp_path, "sleeper") == spawned
    processes.stop(tmp_path, "sleeper")
    assert not spawned.alive()
    assert processes.recorded(tmp_path, "sleeper") is None


def test_process_that_ignores_a_polite_signal_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    spawned = processes.spawn(tmp_path, "deaf", [sys.executable, "-c", script])
    until(lambda: "deaf" in processes.log_tail(tmp_path, "deaf"), "it ignores the signal")
    processes.stop(tmp_path, "deaf", grace_s=0.2)
    assert not spawned.alive()


def test_pid_that_belongs_to_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        real = processes.identify(other.pid)
        processes.record(tmp_path, "gone", Process(real.pid, real.start_ticks - 1))
        assert processes.recorded(tmp_path, "gone") is None
        processes.stop(tmp_path, "gone")
        assert real.alive()
        other.kill()


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    known = processes.identify(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists()
    assert not known.alive()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()
