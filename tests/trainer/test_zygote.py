"""A process that the zygote forked is what `python` would have started: same output, same exit code. Through a real agent."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.polling import until
from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.trainer.agent_edge import Heard, OperatorEdge, Worker, generation

SCRIPTS = {
    "an exit code": "import sys\nsys.exit(3)",
    "a text as exit code": "import sys\nsys.exit('out of luck')",
    "an exception": "def f():\n    raise ValueError('no')\nf()",
    "a chain of exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('then') from e",
    "a syntax error": "def f(:\n",
    "an exit hook": "import atexit\natexit.register(print, 'bye')\nprint('hi')",
    "a thread that is waited for": "import threading, time as t\nthreading.Thread(target=lambda: (t.sleep(.1), print(1))).start()",
    "arguments, paths and names": """
import os, sys
print(sys.argv, sys.path[0], __name__, __file__, __spec__ if '__spec__' in globals() else None, os.getcwd())
print(sys.stdin.read() == '', os.environ['HOME'] == os.path.expanduser('~'))
import regroup, neighbour
print(regroup.__file__, neighbour.__file__, '_regroup_agent' in sys.modules)
""",
    "a class of __main__ that travels to a spawned process": """
import multiprocessing, pickle
class Thing:
    value = 5
def look(thing):
    print(thing.value, type(thing).__module__)
if __name__ == '__main__':
    pickle.loads(pickle.dumps(Thing()))
    process = multiprocessing.get_context('spawn').Process(target=look, args=(Thing(),))
    process.start()
    process.join()
    print(process.exitcode)
""",
    "signals as python sets them": "from signal import *\nprint([getsignal(s) for s in (15, 17, 13)], getsignal(2).__name__)",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_forked_script_is_like_python_itself(operator: OperatorEdge, worker: Worker, text: str) -> None:
    path = worker.directory / "train.py"
    path.write_text(text)
    (worker.directory / "neighbour.py").touch()
    compare(operator, worker, [sys.executable, str(path), "one", "--two"])


def test_forked_module_is_like_python_itself(
    operator: OperatorEdge, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = worker.directory / "digits"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys\nfrom . import __name__ as n\nprint(n, sys.argv, __spec__.name)\nsys.exit(4)"
    )
    monkeypatch.chdir(worker.directory)
    compare(operator, worker, [sys.executable, "-m", "digits.train", "x"])


def test_class_of_the_script_comes_back_from_a_spawned_process(operator: OperatorEdge, worker: Worker) -> None:
    """Where the zygote has imported multiprocessing, as torch does, its own __main__ is known by another name, too."""
    path = worker.directory / "train.py"
    path.write_text(
        "import multiprocessing\n"
        "class Thing: pass\n"
        "def make(n): return Thing()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([type(one) is Thing for one in pool.map(make, range(2))])\n"
    )
    compare(operator, worker, [sys.executable, str(path)], REGROUP_PRELOAD="multiprocessing")


def test_file_that_does_not_exist_is_pythons_own_sentence(operator: OperatorEdge, worker: Worker) -> None:
    compare(operator, worker, [sys.executable, str(worker.directory / "no.py")])


@pytest.mark.parametrize(
    "text", ["cd {here} && A='two words' exec {python} train.py one", "{python} {here}/train.py one"]
)
def test_python_inside_a_shell_is_forked_and_like_the_shells(operator: OperatorEdge, worker: Worker, text: str) -> None:
    (worker.directory / "train.py").write_text(
        "import os, sys\nprint(sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd(), os.environ.get('A'))\n"
        "open(os.path.join(os.path.dirname(__file__), 'comm'), 'w').write(open('/proc/self/comm').read())\nsys.exit(3)"
    )
    compare(operator, worker, ["sh", "-c", text.format(here=worker.directory, python=sys.executable)])
    assert (worker.directory / "comm").read_text() == "trainer-0\n", "it was exec'd, not forked"


@pytest.mark.parametrize("whose", ["==", "!="], ids=["the zygote's", "the one of the process in between"])
def test_fork_that_fails_is_answered_and_the_process_is_execd(
    operator: OperatorEdge, worker: Worker, whose: str
) -> None:
    """As where a pod may have no more processes."""
    failed = worker.directory / "failed"
    (worker.directory / "crowded.py").write_text(
        f"import errno, os\nfork, me = os.fork, os.getpid()\n"
        f"def fails():\n    if os.getpid() {whose} me and not os.path.exists({str(failed)!r}):\n"
        f"        open({str(failed)!r}, 'w').close()\n        raise BlockingIOError(errno.EAGAIN, 'no')\n    return fork()\n"
        f"os.fork = fails\n"
    )
    path = worker.directory / "train.py"
    path.write_text("print(open('/proc/self/comm').read())")
    worker.start(sys.executable, str(path), REGROUP_PRELOAD="crowded")
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Script"))
    operator.wait_phase(Phase.READY)
    operator.tell(generation(1, 0)[0])
    operator.wait_body(wire.Finished, timeout_s=5)
    assert "trainer" not in worker.stdout.read_text()
    assert "The zygote cannot fork (Resource temporarily unavailable); the process is exec'd." in worker.log()
    assert "died" not in worker.log()


def test_processes_of_a_pod_draw_other_numbers_where_the_script_sets_no_seed(
    operator: OperatorEdge, pair: Worker
) -> None:
    path = pair.directory / "train.py"
    (pair.directory / "preloaded.py").write_text(
        "import random, numpy\nunseeded = random.Random()\nof_numpy = numpy.random.default_rng()\n"
        "again = random.Random(1)\nagain.seed()\n"
    )
    path.write_text(
        "import multiprocessing, os, random, numpy, torch, preloaded\n"
        "drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]\n"
        "drawn += [one.random() for one in (preloaded.unseeded, preloaded.of_numpy, preloaded.again)]\n"
        "drawn += [multiprocessing.current_process().authkey.hex()]\n"
        "open(f'{__file__}.{os.environ[\"LOCAL_RANK\"]}', 'w').write('\\n'.join(map(str, drawn)))\n"
    )
    pair.start(sys.executable, str(path), REGROUP_PRELOAD="numpy,torch,preloaded")
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    operator.tell(generation(1, 0, 2)[0])
    operator.wait_body(wire.Finished, timeout_s=60)
    assert "No zygote" not in pair.log()
    first, second = ((pair.directory / f"train.py.{rank}").read_text().split("\n") for rank in range(2))
    assert len(first) == 8
    assert not set(first) & set(second), (
        "every generator that has no seed of the script's, and the key of multiprocessing"
    )


EQUAL = {
    "arguments": "sys.argv, sys.orig_argv, sys.executable, sys.prefix, sys.flags, sys.warnoptions, sys._xoptions",
    "names": "__name__, __file__, __spec__, __package__, __doc__, __cached__, type(__loader__), __loader__.get_filename()",
    "globals": "sorted(name for name in globals() if name.startswith('__'))",
    "path": "sys.path, len(sys.path_hooks)",
    "main": "sys.modules['__main__'].__dict__ is globals(), type(__builtins__)",
    "directory": "os.getcwd(), umask(), os.nice(0), sorted(os.sched_getaffinity(0))",
    "logging": "logging.root.level, logging.root.handlers, logging.root.manager.disable, logging.getLoggerClass()",
    "warnings": "warnings.filters, warnings.showwarning.__module__",
    "exit handlers": "atexit._ncallbacks()",
    "file descriptors": "sorted(f for f in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{f}'))",
    "inherited": "[os.get_inheritable(fd) for fd in range(3)]",
    "tracing": "tracemalloc.is_tracing(), sys.gettrace(), sys.getprofile(), faulthandler.is_enabled()",
    "threads": "threading.enumerate().__len__(), os.listdir('/proc/self/task') == [str(os.getpid())], threading.stack_size()",
    "main thread": "[t.native_id == os.getpid() and t.ident == threading.get_ident() for t in [threading.main_thread()]]",
    "signals": "[(int(s), str(signal.getsignal(s)).split(' at ')[0]) for s in signal.valid_signals()], signal.set_wakeup_fd(-1)",
    "signals in the kernel": "[s for s in open('/proc/self/status') if s.startswith(('SigB', 'SigI', 'SigC', 'Cap', 'NoNew'))]",
    "texts": "locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()",
    "stdin": "sys.stdin.name, sys.stdin.encoding, sys.stdin.errors, os.readlink('/proc/self/fd/0'), sys.stdin.read()",
    "stdout": "[(s.name, s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]",
    "hooks": "str((sys.excepthook, sys.displayhook, sys.unraisablehook)), threading.excepthook.__name__, sys.getswitchinterval()",
    "limits": "sys.getrecursionlimit(), [resource.getrlimit(n) for n in range(16)], open('/proc/self/oom_score_adj').read()",
    "collector": "gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.callbacks",
    "multiprocessing": "multiprocessing.get_start_method(True), multiprocessing.current_process()",
    "its children": "multiprocessing.active_children(), next(multiprocessing.process._process_counter)",
    "temporary files": "os.environ.setdefault('TMPDIR', os.getcwd()), tempfile.gettempdir()",
    "numpy": "numpy.geterr(), numpy.get_printoptions(), numpy.random.RandomState(1).rand()",
    "a set seed": "random.seed(1), random.random(), numpy.random.seed(1), numpy.random.rand(), preloaded.seeded.random(), "
    "preloaded.of_numpy_seeded.random()",
}
"""What is equal in a process that `python` starts and in one that is forked, as expressions."""
UNEQUAL = {
    "import hooks": "len(sys.meta_path)",
    "session": "os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()",
    "imported modules": "'json' in before, 'numpy' in before",
    "frozen objects": "gc.get_freeze_count() > 0",
    "command line in the kernel": "'train.py' in open('/proc/self/cmdline').read(), open('/proc/self/comm').read()",
}
"""What is not, and is in the table of docs/how-to/fast-starts.md."""
IN_TORCH = {
    "threads": "torch.get_num_threads(), torch.get_num_interop_threads()",
    "numbers": "torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()",
    "determinism": "torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled",
    "modes": "torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()",
    "a GPU": "torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), torch.backends.cuda.matmul.allow_tf32",
    "processes": "torch.multiprocessing.get_start_method(True), torch.multiprocessing.get_sharing_strategy()",
    "groups": "torch.distributed.is_initialized(), torch.distributed.get_debug_level()",
    "a set seed": "torch.manual_seed(1).initial_seed(), torch.rand(2)",
}
LOOK = """
import sys
before = set(sys.modules)
import atexit, faulthandler, gc, json, locale, logging, multiprocessing, os, random, resource, signal, tempfile, threading
import tracemalloc, warnings, numpy
def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
"""


def test_forked_process_is_the_one_that_python_starts(
    operator: OperatorEdge, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker.directory / "preloaded.py").write_text(
        "import random, numpy\nseeded = random.Random(1)\nof_numpy_seeded = numpy.random.default_rng(1)\n"
    )
    monkeypatch.chdir(worker.directory)
    modules = "json,logging,multiprocessing,numpy,tempfile,threading,preloaded"
    differ = facts(operator, worker, LOOK + "import preloaded\n", EQUAL | UNEQUAL, REGROUP_PRELOAD=modules)
    assert set(differ) == set(UNEQUAL), differ


@pytest.mark.slow
def test_forked_process_has_torch_as_the_script_would_import_it(
    operator: OperatorEdge, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch, torch.distributed\n"
    assert facts(operator, worker, text, IN_TORCH, REGROUP_PRELOAD="torch") == {}


def test_variable_that_the_script_sets_before_its_imports_is_there_in_the_preload(
    operator: OperatorEdge, worker: Worker
) -> None:
    """As OMP_NUM_THREADS, which torch reads as it is imported."""
    (worker.directory / "reads.py").write_text("import os\nfound = os.environ.get('OMP_NUM_THREADS')\n")
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport reads\nprint(reads.found, os.environ['OMP_NUM_THREADS'])\n"
    (worker.directory / "train.py").write_text(text)
    compare(operator, worker, [sys.executable, str(worker.directory / "train.py")], REGROUP_PRELOAD="reads")
    assert worker.stdout.read_text() == "3 3\n"


def test_script_whose_variable_nobody_can_know_beforehand_is_execd(operator: OperatorEdge, worker: Worker) -> None:
    (worker.directory / "reads.py").write_text("import os\nfound = os.environ.get('OMP_NUM_THREADS')\n")
    path = worker.directory / "train.py"
    path.write_text("import os\nos.environ['OMP_NUM_THREADS'] = str(1 + 2)\nimport reads\nprint(reads.found)\n")
    worker.start(sys.executable, str(path), REGROUP_PRELOAD="reads")
    to_the_end(operator)
    until(lambda: worker.stdout.read_text() == "3\n", "what the script has set", details=worker.log)
    assert "The script sets OMP_NUM_THREADS before it imports torch" in worker.log()


def facts(
    operator: OperatorEdge, worker: Worker, text: str, of: dict[str, str], **environ: str
) -> dict[str, list[str]]:
    """Return what differs between a script under python and under the agent, of these expressions, by name."""
    path = worker.directory / "train.py"
    found = worker.directory / "found"
    lines = [f"said[{name!r}] = repr(({expression}))\n" for name, expression in of.items()]
    path.write_text(
        f"{text}said = {{}}\n{''.join(lines)}import json\n"
        f"open({str(found)!r} + ('.agent' if 'LOCAL_RANK' in os.environ else ''), 'w').write(json.dumps(said))\n"
    )
    command = [sys.executable, str(path), "one", "--two"]
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, preexec_fn=default, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert done.returncode == 0
    worker.start(*command, **environ)
    end = to_the_end(operator)
    assert isinstance(end.body, wire.Finished), worker.log()
    assert "No zygote" not in worker.log()
    want, got = (json.loads(one.read_text()) for one in (found, found.with_name("found.agent")))
    return {name: [want[name], got[name]] for name in of if want[name] != got[name]}


def to_the_end(operator: OperatorEdge) -> Heard:
    """Have the agent run its script in a group of one, and return how that ended."""
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    operator.tell(generation(1, 0)[0])
    return operator.wait(lambda h: isinstance(h.body, (wire.Fault, wire.Finished)), timeout_s=60)


def test_command_line_of_a_forked_process_is_short_and_names_the_script(operator: OperatorEdge, worker: Worker) -> None:
    line = {"line": "open('/proc/self/cmdline').read().split(chr(0))[:-1]"}
    got = facts(operator, worker, "import os\n", line)["line"][1]
    start = [sys.executable, "-u", "-c", "import os, sys; exec(os.read(int(sys.argv[1]), 1 << 20))"]
    command = [sys.executable, str(worker.directory / "train.py"), "one", "--two"]
    shown = ast.literal_eval(got)
    assert (shown[:4], shown[5:]) == (start, ["regroup-zygote", *command])


@pytest.mark.parametrize("way", ["forked", "execd", "with a fork of its own"])
def test_helper_in_a_session_of_its_own_ends_with_its_process(
    operator: OperatorEdge, pair: Worker, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The process that follows can have its port. The helper of the other process of the pod lives."""
    monkeypatch.chdir(pair.directory)
    helper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid"
    if way == "with a fork of its own":
        helper = "forked()"
    (pair.directory / "train.py").write_text(
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # the end of one is that of the other, a grace later
        "def forked():\n"
        "    ours, theirs = os.pipe()\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        if not (pid := os.fork()):\n"
        "            time.sleep(600)\n"
        "        os.write(theirs, str(pid).encode())\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    return int(os.read(ours, 20))\n"
        f"rank, pid = os.environ['LOCAL_RANK'], {helper}\n"
        "name = 'helper' + rank + '.' + os.environ['REGROUP_INCARNATION']\n"
        "open(name + '.part', 'w').write(str(pid))\nos.rename(name + '.part', name)\n"
        "while rank == '1' or not os.path.exists('fail'): time.sleep(0.01)\nos.unlink('fail')\nsys.exit(3)\n"
    )
    pair.start(sys.executable, "train.py", REGROUP_PRELOAD="" if way == "execd" else "json")
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    operator.tell(generation(1, 0, 2)[0])

    def helpers(rank: int) -> list[int]:
        return [int(one.read_text()) for one in pair.directory.glob(f"helper{rank}.?")]

    until(lambda: helpers(0) and helpers(1), "both have their helper", details=pair.log)
    (first,), (second,) = helpers(0), helpers(1)
    try:
        (pair.directory / "fail").touch()
        operator.wait_body(wire.Fault)
        until(lambda: not Path(f"/proc/{first}").exists(), "the helper of the one that failed has ended")
        assert Path(f"/proc/{second}").exists()
    finally:
        pair.close()
        for pid in {*helpers(0), *helpers(1)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def compare(operator: OperatorEdge, worker: Worker, command: list[str], **environ: str) -> None:
    # A shell's background job ignores SIGINT, and so would the python that it starts.
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    want = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, preexec_fn=default)
    worker.start(*command, **environ)
    hello = operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    if not hello.report.condition.session:
        operator.tell(generation(1, 0)[0])
    end = operator.wait(lambda h: isinstance(h.body, (wire.Fault, wire.Finished)))
    assert "No zygote" not in worker.log()
    # A thread writes the log (output.py): the report may arrive before the last line is in it.
    until(lambda: is_of_runs(said(worker), want.stderr), "what python itself writes", details=lambda: said(worker))
    assert is_of_runs(worker.stdout.read_text(), want.stdout)
    assert (end.body.exit_code if isinstance(end.body, wire.Fault) else 0) == want.returncode
    if want.stderr:
        assert end.body.last_line == want.stderr.splitlines()[-1]


def is_of_runs(text: str, once: str) -> bool:
    """Return whether a text is what one run writes. The agent starts a script that has failed again at once: on a busy machine the
    beginning of the second run may be there, too."""
    rest = text.removeprefix(once)
    return text.startswith(once) and once.startswith(rest)


def said(worker: Worker) -> str:
    """Return what the script wrote to stderr: the log without the agent's own lines."""
    return "".join(line for line in worker.log().splitlines(keepends=True) if not line.startswith("regroup: "))
