"""A process that the zygote forked is what `python` would have started: same output, same exit code. Through a real agent."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys

import pytest

from harness.polling import until
from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.trainer.agent_edge import OperatorEdge, Worker, generation

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
    path.write_text(
        "import os, random, numpy, torch\n"
        "drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]\n"
        "open(f'{__file__}.{os.environ[\"LOCAL_RANK\"]}', 'w').write('\\n'.join(map(str, drawn)))\n"
    )
    pair.start(sys.executable, str(path), REGROUP_PRELOAD="numpy,torch")
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    operator.tell(generation(1, 0, 2)[0])
    operator.wait_body(wire.Finished)
    assert "No zygote" not in pair.log()
    first, second = ((pair.directory / f"train.py.{rank}").read_text().split("\n") for rank in range(2))
    assert len(first) == 4
    assert not set(first) & set(second), "random, numpy.random, torch.rand and torch.initial_seed differ"


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
