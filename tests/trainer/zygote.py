"""A process that has imported torch and forks trainers, so that a test pays for the import once.

Owns process start, reaping and output files. Fed with JSON lines on stdin {script, args, env, output}; answers with the pid. The
agent's zygote is another thing, tested elsewhere; this one only saves time.
"""

import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Zygote:
    """The test's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # imported: no timed wait of a test contains this

    def start(self, script: Path, env: dict[str, str], output: Path, args: tuple[str, ...] = ()) -> int:
        """Fork a process that runs the script, and return its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"script": str(script), "args": args, "env": env, "output": str(output)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it; trainers are the caller's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def _main() -> None:
    import torch
    import torch._dynamo  # every optimizer's constructor imports it; this and what follows takes each script seconds
    import torch._functorch.aot_autograd
    import torch.distributed.checkpoint.default_planner
    from sklearn import datasets  # noqa: F401

    import regroup.job
    import regroup.train.loop  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request)
        print(pid, flush=True)


def _become(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1)  # for a person who looks for a hang
    os.environ.update(request["env"])
    code = 1
    try:
        sys.argv = [str(request["script"]), *request["args"]]
        sys.path[0] = str(Path(request["script"]).parent)
        runpy.run_path(str(request["script"]), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
