"""A job under `regroup run`: agents, zygotes and trainer processes of this machine, found by /proc and hit by signals."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.job import JobError, NothingToHitError
from chaos.kinds import SCRIPT
from chaos.plan import Fault, Scenario
from chaos.signals import Agent, SignalledJob, Trainer
from harness.polling import within
from harness.processes import alive, children, environment_of, name_of, start_of, state_of, waits_in

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).resolve().parent.parent
DISK_BYTES = 8 << 20
PIPE_BYTES = 4096
"""Size of the job's log pipe, so small that the job feels a stalled reader at once."""
CHECKPOINT_EVERY_S = 1


def script_of(job: Scenario) -> str:
    """Return the name of the job's script in SCRIPTS."""
    if job.shape:
        return "split.py"
    return "plain.py" if job.tier == SCRIPT else "session.py"


class LocalJob(SignalledJob):
    """`regroup run`, started with the scenario's numbers."""

    def __init__(self, scenario: Scenario, directory: Path, steps: int, *, needs_disk: bool) -> None:
        """Prepare a job. With `needs_disk` a fault fills the disk, so the checkpoints lie on a small tmpfs (root only)."""
        super().__init__(scenario, directory, directory / "trace", steps)
        self.traces.mkdir(parents=True)
        self.state = directory / "state"
        self.checkpoints = directory / "checkpoints"
        self.checkpoints.mkdir()
        self._disk = needs_disk and os.geteuid() == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = threading.Event()
        self._reading.set()
        self._status: tuple[int, dict[str, Any]] = (0, {})
        self._workers_of: dict[str, str] = {}
        self._released: set[str] = set()

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._disk:
            size = f"size={DISK_BYTES},mode=755"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.checkpoints)], check=True)
        read_fd, write_fd = os.pipe()
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._process = subprocess.Popen(
            self.command(),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            start_new_session=True,
        )
        os.close(write_fd)
        threading.Thread(target=self._read_log, args=(read_fd,), daemon=True).start()

    def command(self) -> list[str]:
        """Return the command line of `regroup run`."""
        job = self.scenario
        out = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(job.workers), "--name", "chaos"]
        out += ["--processes-per-worker", str(job.processes), "--state-dir", str(self.state)]
        out += ["--max-restarts", "1000000", "--disconnect-seconds", "2", "--join-quiet", "0.2"]
        if job.elastic:
            out += ["--min", str(job.min_workers), "--max", str(job.max_workers)]
        if job.workers_per_group > 1:
            out += ["--workers-per-group", str(job.workers_per_group)]
        if job.tier != SCRIPT:
            out += ["--checkpoint", str(self.checkpoints), "--checkpoint-every", str(CHECKPOINT_EVERY_S)]
        return [*out, str(SCRIPTS / script_of(job))]

    def _environment(self) -> dict[str, str]:
        mine = {"CHAOS_TRACE": str(self.traces), "CHAOS_STEPS": str(self.steps), "OMP_NUM_THREADS": "1"}
        if self.scenario.shape:
            mine |= {"CHAOS_MESH": self.scenario.shape.mesh, "CHAOS_SCHEDULE": self.scenario.shape.schedule}
        return {**os.environ, **mine, "CHAOS_EVALUATE": str(self.scenario.evaluate_every)}

    def _read_log(self, fd: int) -> None:
        with (self.directory / "log").open("wb", buffering=0) as log:
            while True:
                self._reading.wait()
                data = os.read(fd, 1 << 16)
                if not data:
                    os.close(fd)
                    return
                log.write(data)

    def ended(self) -> str | None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        return self._outcome() or f"`regroup run` ended with exit code {code}"

    def _outcome(self) -> str:
        """Return the phase in which the job has ended, or "" while it has not."""
        phase = self.status().get("phase")
        return phase if phase in ("Succeeded", "Failed") else ""

    def close(self) -> None:
        self.undo.close()
        process = self._process
        if process is None:
            return
        pids = [
            pid
            for a in self.agents()
            for pid in (a.pid, *(t.pid for t in a.trainers), *([a.zygote] if a.zygote else []))
        ]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()  # its agents die with it, and theirs with them
                process.wait()
        within(lambda: not any(alive(pid) for pid in pids), 5)
        if self._disk:
            subprocess.run(["umount", "--lazy", str(self.checkpoints)], check=True)

    # --- looking -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        path = self.state / "job.json"
        try:
            changed_ns = path.stat().st_mtime_ns
            if changed_ns != self._status[0]:
                self._status = (changed_ns, json.loads(path.read_text()).get("status") or {})
        except FileNotFoundError:
            pass
        return self._status[1]

    def agents(self) -> list[Agent]:
        assert self._process is not None
        found = []
        for pid in children(self._process.pid):
            environment = environment_of(pid)
            worker, uid = (environment.get(name) for name in ("REGROUP_POD_NAME", "REGROUP_POD_UID"))
            if not worker or not uid or not alive(pid):
                continue
            self._workers_of[uid] = worker
            named = [(name_of(c), c) for c in children(pid) if alive(c)]
            trainers = sorted((name, c) for name, c in named if name.startswith("trainer-") or _is_exec(c, name))
            zygotes = [c for name, c in named if name == "zygote"]
            slot = int(worker.split("-")[-2])
            found.append(
                Agent(
                    pid,
                    worker,
                    slot,
                    tuple(Trainer(c, c, start_of(c)) for _, c in trainers),
                    zygotes[0] if zygotes else None,
                )
            )
        return sorted(found, key=lambda a: (a.slot, a.worker))

    def look(self) -> None:
        now_s = time.time()
        released = set(self.status().get("released") or ()) - self._released
        if released - self._workers_of.keys():
            self.agents()  # learns their names
        self._released |= released
        gone = {self._workers_of.get(uid) for uid in self._released}
        for built in self.reader.trace.built:
            if built.who[0] not in gone and alive(built.who[1]) and start_of(built.who[1]) == built.who[2]:
                self.alive_until_s[built.who] = now_s

    def changing(self) -> str:
        """Return how far the newest change of members is, from the agents' own files."""
        newest = int((self.status().get("membership") or {}).get("generation", 0))
        files = [self._agent_file(path) for path in self.state.glob("*/state/agent.json")]
        entered = [f for f in files if f.get("entered", 0) == newest]
        adopted = [f for f in entered if f.get("adopted", 0) == newest]
        if (self.status().get("membership") or {}).get("adopted"):
            return ""
        return "adopting" if adopted else "forming"

    @staticmethod
    def _agent_file(path: Path) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def diagnosis(self) -> str:
        log = (self.directory / "log").read_text(errors="replace").splitlines()
        said = [line for line in log if not re.match(r"(step \d+ )", line)]
        files = {p.parent.parent.name: self._agent_file(p) for p in self.state.glob("*/state/agent.json")}
        processes = [
            f"{a.worker}: agent {a.pid} {state_of(a.pid)}, zygote {a.zygote}, trainers "
            + ", ".join(f"{t.pid} {state_of(t.pid)} {waits_in(t.pid)}" for t in a.trainers)
            for a in self.agents()
        ]
        status = {k: v for k, v in self.status().items() if k != "incidents"}
        return "\n".join([json.dumps(status, indent=1), json.dumps(files), *processes, *said[-60:]])

    # --- breaking ----------------------------------------------------------------------------------------------------

    def scale(self, workers: int) -> None:
        command = [sys.executable, "-m", "regroup_cli", "scale", str(self.state), str(workers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            if outcome := self._outcome():
                raise NothingToHitError(f"the job has ended ({outcome})")
            raise JobError(f"`regroup scale` failed: {done.stderr.strip()}")

    def _disk_full(self, fault: Fault) -> str:
        if not self._disk:
            raise NothingToHitError("mounting a small tmpfs needs root")
        ballast = self.checkpoints / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        self.undo.after(fault.lasts_s, lambda: ballast.unlink(missing_ok=True))
        return str(self.checkpoints)

    def _stall_log(self, fault: Fault) -> str:
        self._reading.clear()
        self.undo.after(fault.lasts_s, self._reading.set)
        return "the pipe of stdout and stderr"


def _is_exec(pid: int, name: str) -> bool:
    """Return whether a process is a trainer that its agent has exec'd, without a zygote."""
    return name != "zygote" and "LOCAL_RANK" in environment_of(pid)
