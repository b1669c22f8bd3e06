"""Asks a launcher's own parser what a command means, and starts nothing.

Runs as `python -c <this text> REQUEST` under the trainer's interpreter, or in a fork of the zygote. It imports nothing of ours. Its
answer is one line of JSON on stdout that begins with MARK, since launchers print while they are imported.
"""

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

MARK = "regroup-launcher: "


class _Refused(Exception):
    """The launcher refuses the command. The text is the launcher's own."""


class _Captured(BaseException):
    """The launcher was about to start processes. No `except Exception` of its own catches this."""


def _parsed(parse: Callable[[], Any]) -> Any:
    """Return what `parse` returns. argparse prints its usage and exits: only its last line is kept."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse()
    except SystemExit as stop:
        lines = said.getvalue().strip().splitlines()
        raise _Refused(lines[-1].partition("error: ")[2] or lines[-1] if lines else f"exit {stop.code}") from None


def _torchrun(arguments: list[str], module: str) -> dict[str, Any]:
    run = importlib.import_module("torch.distributed.run")
    parser = run.get_args_parser()
    if module == "torch.distributed.launch":
        parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    for name in ("nproc_per_node", "nnodes"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})  # so that a default is told from a number that somebody wrote
    return _of_torchrun(_parsed(lambda: parser.parse_args(arguments)))


def _of_torchrun(args: Any) -> dict[str, Any]:
    # config_from_args would set OMP_NUM_THREADS, make a directory for logs and ask for GPUs.
    run = importlib.import_module("torch.distributed.run")
    return {
        "program": args.training_script,
        "args": list(args.training_script_args),
        "module": bool(args.module),
        "no_python": bool(args.no_python),
        "processes": None if args.nproc_per_node is None else str(args.nproc_per_node),
        "workers": None if args.nnodes is None else list(run.parse_min_max_nnodes(str(args.nnodes))),
    }


def _accelerate(arguments: list[str], _module: str) -> dict[str, Any]:
    """Run `accelerate launch` up to the call that would start processes; the difference of the environment is what it sets."""
    run, launch = (
        importlib.import_module("torch.distributed.run"),
        importlib.import_module("accelerate.commands.launch"),
    )
    seen: dict[str, Any] = {}

    def start_by_torchrun(_args: Any) -> None:
        seen["environ"] = dict(os.environ)
        raise _Captured

    class Starter:
        CalledProcessError = OSError

        @staticmethod
        def Popen(_command: Any, env: "dict[str, str] | None" = None, **_given: Any) -> None:
            seen["environ"] = dict(os.environ if env is None else env)
            raise _Captured

    load = launch.load_config_from_file
    files = []

    def load_and_keep(*given: Any) -> Any:
        files.append(load(*given))
        return files[-1]

    before = dict(os.environ)
    replaced = {"subprocess": Starter, "load_config_from_file": load_and_keep}
    for name, value in replaced.items():
        setattr(launch, name, value)
    setattr(run, "run", start_by_torchrun)  # noqa: B010
    # The port is the generation's, and it is not used yet.
    setattr(importlib.import_module("accelerate.utils.launch"), "is_port_in_use", lambda *_given: False)  # noqa: B010
    args = _parsed(lambda: launch.launch_command_parser().parse_args(arguments))
    processes, machines = args.num_processes, args.num_machines
    args.main_process_ip, args.main_process_port, args.machine_rank = "127.0.0.1", 29500, 0
    with contextlib.suppress(_Captured):
        launch.launch_command(args)
    by_file = files[-1] if files else None
    if processes is None and by_file is not None:
        processes = by_file.num_processes
    if machines is None and by_file is not None and (by_file.num_machines or 1) > 1:
        machines = by_file.num_machines
    environ = {name: value for name, value in seen["environ"].items() if before.get(name) != value}
    torch = importlib.import_module("torch")
    has_device = getattr(torch, "accelerator", torch.cuda).is_available()
    if not has_device and environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        environ["ACCELERATE_USE_CPU"] = "true"  # without it accelerate forms no group, and each rank trains alone
    return {
        "program": args.training_script,
        "args": list(args.training_script_args),
        "module": bool(args.module),
        "no_python": bool(args.no_python),
        "processes": None if processes is None else str(processes // (machines or 1)),
        "workers": None if machines is None else [machines, machines],
        "environ": environ,
    }


def _deepspeed(arguments: list[str], _module: str) -> dict[str, Any]:
    runner = importlib.import_module("deepspeed.launcher.runner")
    args = _parsed(lambda: runner.parse_args(arguments))
    return {
        "program": args.user_script,
        "args": list(args.user_args),
        "module": bool(args.module),
        "no_python": bool(args.no_python),
        "processes": None if args.num_gpus < 0 else str(args.num_gpus),
        "workers": None if args.num_nodes < 0 else [args.num_nodes, args.num_nodes],
    }


_PARSERS = {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    name = request["launcher"]
    try:
        return _PARSERS[name](request["arguments"], request["module"])
    except _Refused as error:
        return {"refused": f"{name} refuses the command ({error})."}
    except ImportError as error:
        return {"refused": f"{name} cannot be imported by {sys.executable} ({error})."}
    except Exception as error:
        return {"refused": f"{name} refuses the command ({type(error).__name__}: {error})."}


print("\n" + MARK + json.dumps(_answer(json.loads(sys.argv[1]))), flush=True)
