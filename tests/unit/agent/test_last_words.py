"""Which lines of a process's stderr explain its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from _regroup_agent.last_words import MAX_LINE, MAX_LINES, MAX_TAIL, last_words

TRACEBACK = """Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    main()
  File "/work/train.py", line 9, in main
    raise ValueError("boom")
ValueError: boom
"""
RANKED = "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines())


@pytest.mark.parametrize(
    ("stderr", "line", "tail"),
    [
        pytest.param("", "", "", id="nothing"),
        pytest.param("warning\n\nout of luck\n\n", "out of luck", "warning\nout of luck", id="no traceback: the last lines"),
        pytest.param("noise\n" + TRACEBACK, "ValueError: boom", TRACEBACK.strip(), id="a traceback"),
        pytest.param(RANKED, "ValueError: boom", TRACEBACK.strip(), id="with torch's prefix"),
        pytest.param(TRACEBACK + "[W1122 c10d] destroy_process_group() was not called\n", "ValueError: boom", TRACEBACK.strip(),
                     id="what comes after it explains nothing"),
        pytest.param(TRACEBACK.replace("boom", "first") + "retrying\n" + TRACEBACK, "ValueError: boom", TRACEBACK.strip(),
                     id="the last of several"),
    ],
)  # fmt: skip
def test_last_words(stderr: str, line: str, tail: str) -> None:
    got = last_words(stderr.encode())
    assert (got.line, got.tail) == (line, tail)


def test_they_are_bounded_and_keep_the_end() -> None:
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f({n})\n' for n in range(500))
    got = last_words(f"Traceback (most recent call last):\n{frames}RecursionError: {'x' * 2000}".encode())
    assert got.line.startswith("RecursionError: x")
    assert (len(got.line), len(got.tail) <= MAX_TAIL, len(got.tail.splitlines()) <= MAX_LINES) == (MAX_LINE, True, True)
    short = last_words(f"Traceback (most recent call last):\n{frames}RecursionError: deep".encode())
    assert short.tail.splitlines()[-2:] == ["    f(499)", "RecursionError: deep"]


def test_bytes_that_are_no_text_are_no_trouble() -> None:
    assert last_words(b"\xff\xfe broken \xc3\n").line.endswith("broken \ufffd")


@pytest.mark.parametrize(
    ("script", "line", "frame"),
    [
        ("def f():\n    raise ValueError('boom')\nf()", "ValueError: boom", 'File "<string>", line 2, in f'),
        (
            "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)",
            "Fatal Python error: Segmentation fault",
            "string_at",
        ),
    ],
)
def test_of_a_real_process(script: str, line: str, frame: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    got = last_words(done.stderr)
    assert done.returncode != 0
    assert frame in got.tail
    assert got.line == line


LOADER = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise ValueError(f"row {i} is broken")
if __name__ == "__main__":
    next(iter(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))
"""
MISFIT = """
import torch
torch.nn.Linear(2, 3).load_state_dict({"weight": torch.zeros(5, 2), "other": torch.zeros(1)})
"""
INVALID = """
import pydantic
class Config(pydantic.BaseModel):
    steps: int
Config(steps="many")
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(LOADER, ["ValueError: row 0 is broken"], id="an exception of a DataLoader's worker"),
        pytest.param(
            MISFIT,
            ["RuntimeError: Error(s) in loading state_dict for Linear:", 'Missing key(s) in state_dict: "bias"'],
            id="a state_dict that does not fit",
        ),
        pytest.param(INVALID, ["1 validation error for Config", "steps", "valid integer"], id="pydantic"),
    ],
)
def test_message_of_several_lines_says_what_is_wrong(script: str, words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    got = last_words(done.stderr + b"[W1122 c10d] destroy_process_group() was not called\n")
    assert all(word in got.line for word in words), got.line
    assert got.line.startswith(words[0].split(":")[0]) or "ValidationError" in got.line
    assert "destroy_process_group" not in got.line or "ValidationError" in got.line
    assert got.tail.splitlines()[-1].strip() in got.line


REAL = {
    "an exception group": (
        "def f():\n    try:\n        raise ValueError('row 3')\n    except ValueError as e:\n        return e\n"
        "raise ExceptionGroup('two tasks failed', [f(), ExceptionGroup('inner', [KeyError('lr')])])",
        "ExceptionGroup: two tasks failed (2 sub-exceptions) ValueError: row 3 "
        "ExceptionGroup: inner (1 sub-exception) KeyError: 'lr'",
    ),
    "a task group": (
        "import asyncio\nasync def bad(): raise OSError('no host')\nasync def main():\n"
        "    async with asyncio.TaskGroup() as group:\n        group.create_task(bad())\nasyncio.run(main())",
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception) OSError: no host",
    ),
    "an exception while another is handled": (
        "try:\n    {}['lr']\nexcept KeyError:\n    raise RuntimeError('the configuration has no learning rate')",
        "RuntimeError: the configuration has no learning rate",
    ),
    "a cause": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('no rows') from e",
        "RuntimeError: no rows",
    ),
    "a fatal error after a traceback that was printed": (
        "import faulthandler, traceback, os\nfaulthandler.enable()\ntry:\n    1 / 0\n"
        "except ZeroDivisionError:\n    traceback.print_exc()\nos.abort()",
        "Fatal Python error: Aborted",
    ),
    "a message that goes on below": (
        "class InstantiationException(Exception): pass\n"
        "raise InstantiationException(\"Error in call to target '__main__.Net':\\nValueError('boom')\\nfull_key: model\")",
        "InstantiationException: Error in call to target '__main__.Net': ValueError('boom') full_key: model",
    ),
    "a note": ("e = ValueError('boom')\ne.add_note('in row 3')\nraise e", "ValueError: boom"),
}
SPAWNED = {
    "a spawned process": (
        "import torch.multiprocessing as mp, functools, operator\nif __name__ == '__main__':\n"
        "    mp.start_processes(functools.partial(operator.truediv, 1), nprocs=1, start_method='fork')",
        "ZeroDivisionError: division by zero",
    ),
    "a spawned process that exits": (
        "import torch.multiprocessing as mp, os\nif __name__ == '__main__':\n"
        "    mp.start_processes(os._exit, args=(), nprocs=1, start_method='fork')\n    "
        "mp.start_processes(lambda i: os._exit(3), nprocs=1, start_method='fork')",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 3",
    ),
}


@pytest.mark.parametrize(
    ("script", "line"),
    [
        *(pytest.param(*one, id=name) for name, one in REAL.items()),
        *(pytest.param(*one, id=name, marks=pytest.mark.slow) for name, one in SPAWNED.items()),
    ],
)
def test_last_words_of_programs_that_ran(script: str, line: str) -> None:
    """What comes after it, another writer has written."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode != 0
    assert last_words(done.stderr).line == line, done.stderr.decode()
    assert last_words(done.stderr + b"[W1122 c10d] destroy_process_group() was not called\n").line == line
    ranked = b"".join(b"[rank1]: " + one for one in done.stderr.splitlines(keepends=True))
    assert last_words(ranked).line == line


TERMINATED = "terminate called after throwing an instance of 'std::runtime_error' what():  no such device"


def test_exception_of_c_plus_plus() -> None:
    """The text is what g++'s runtime writes for `throw std::runtime_error("no such device")`; faulthandler adds its own below."""
    text = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such device\n"
    assert last_words(text.encode()).line == TERMINATED
    assert last_words((TRACEBACK + text).encode()).line == TERMINATED, "a traceback that was printed before"
    fatal = 'Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n  File "t.py", line 3 in <module>\n'
    got = last_words((text + fatal).encode())
    assert got.line == f"{TERMINATED} Fatal Python error: Aborted"
    assert "t.py" in got.tail


LISTED = b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: No weights for:\n\n  layer 1\n'


def test_empty_line_of_which_torchs_prefix_is_left() -> None:
    """An error here would be the agent's: it would not hear that the process has ended."""
    ranked = b"".join(b"[rank1]: " + line for line in LISTED.splitlines(keepends=True))
    assert last_words(ranked) == last_words(LISTED)
    assert last_words(ranked).line == "ValueError: No weights for: layer 1"
    for end in range(len(ranked)):
        last_words(ranked[:end] + b"\n[rank1]:\n")
