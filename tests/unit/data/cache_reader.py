"""A process that reads names through a cache, for the tests: DIRECTORY MAX_BYTES WAIT_S LOG HOW NAME...

Each fetch appends its name to LOG. HOW: plain; asks: says so before each name; blocks: a fetch says so and goes on when a line
comes; full: files may not grow beyond 100 bytes; halfway or renaming: the process is killed when half of an entry is written, or
before it gets its name; "user N": as user N, who is not root. Prints `asked` or `fetching`, and for each name the length of what it
got, or `wrong`. Each name is read twice.
"""

import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

import regroup

package = types.ModuleType("regroup.data")  # without what its __init__ imports: torch takes seconds
package.__path__ = [str(Path(regroup.__file__).parent / "data")]
sys.modules["regroup.data"] = package

from regroup.data.cache import cached  # noqa: E402

directory, max_bytes, wait_s, log, how, *names = sys.argv[1:]


def content(name: str) -> bytes:
    return name.encode() * (500 + sum(map(ord, name)) % 50)


def fetch(name: str) -> bytes:
    with open(log, "ab", buffering=0) as file:
        file.write(f"{name}\n".encode())
    if how == "blocks":
        print("fetching", flush=True)
        sys.stdin.readline()
    return content(name)


def killed(*_arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if how == "halfway":
    whole: Any = os.pwrite

    def half(descriptor: int, data: Any, offset: int) -> Any:
        if len(data) > 100:
            whole(descriptor, data[: len(data) // 2], offset)
            killed()
        return whole(descriptor, data, offset)

    os.pwrite = half
if how == "renaming":
    Path.replace = killed  # type: ignore[assignment,method-assign]
if how == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
if how.startswith("user "):
    os.umask(0o022)
    os.seteuid(int(how[5:]))
read = cached(fetch, directory, int(max_bytes), wait_s=float(wait_s))
for name in names:
    if how == "asks":
        print("asked", flush=True)
    print(len(read(name)) if read(name) == content(name) else "wrong", flush=True)
