"""The way to the API server: `kubectl proxy` on a Unix socket, or the service account of the pod that this process runs in.

kubectl proxy makes every login work that kubectl knows, and this package needs no code for any of them. Its socket is in a
directory of mode 0700, so that no other user of the machine can use the login. A TCP port would be open to all of them.

The proxy must end with this process, even after SIGKILL. A shell therefore waits for the end of a pipe that this process holds,
and then ends kubectl. Ctrl-C reaches neither of the two, because a command may need the API to clean up after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from regroup_client.api import Api, SocketRoute, TlsRoute
from regroup_client.errors import AccessError

START_S = 30.0
"""Longest wait for kubectl proxy. It reads files only, so that a loaded machine is all that can delay it."""
END_S = 5.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Files of a pod's service account: token, ca.crt, namespace."""
_LONGEST_SOCKET = 100
"""Characters of a socket's path; Linux has room for 107, macOS for 103."""
# The shell ends kubectl when its standard input ends. Its own outputs are closed, so that the end of kubectl's is seen. A login
# may ask the user something, so that kubectl has the terminal if there is one.
# It also removes the socket, since a command that was killed cannot.
_GUARD = (
    'trap "" INT QUIT; tty=$1 home=$2; shift 2; "$@" <"$tty" & exec >/dev/null 2>&1; read -r _; kill $!; wait; '
    'rm -f "$home/api"; rmdir "$home"'
)
_KLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")


@dataclass(frozen=True)
class Target:
    """The cluster and namespace that the user chose. None: what kubectl would choose."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def options(self) -> list[str]:
        """Return the options of kubectl that choose the cluster."""
        chosen = (("context", self.context), ("kubeconfig", self.kubeconfig))
        return [f"--{name}={value}" for name, value in chosen if value]


@contextlib.contextmanager
def connect(target: Target) -> Iterator[Api]:
    """Yield the API of the target's cluster, with its namespace. At the end, the proxy ends. Raises AccessError."""
    if _in_pod(target):
        with contextlib.closing(Api(_account_route(), target.namespace or _read(ACCOUNT / "namespace"))) as api:
            yield api
        return
    namespace = target.namespace or _namespace_of_context(target)
    with _proxy(target) as route, contextlib.closing(Api(route, namespace)) as api:
        yield api


def _in_pod(target: Target) -> bool:
    """Return whether to use the service account. A kubeconfig that the user names or has comes first, as kubectl does it."""
    has_config = target.context or target.kubeconfig or os.environ.get("KUBECONFIG")
    return (
        not has_config and "KUBERNETES_SERVICE_HOST" in os.environ and not Path.home().joinpath(".kube/config").exists()
    )


def _account_route() -> TlsRoute:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise AccessError(
            f"The certificates of the pod's service account ({ACCOUNT}/ca.crt) cannot be read ({error}). Set "
            "automountServiceAccountToken in the pod, or give --kubeconfig."
        ) from None
    # The kubelet replaces the token from time to time, so that it is read for each request.
    return TlsRoute(host, int(port), trusted, lambda: _read(ACCOUNT / "token"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise AccessError(
            f"The pod's service account ({path}) cannot be read ({error.strerror}). Set automountServiceAccountToken in the pod, "
            "or give --kubeconfig."
        ) from None


def kubectl() -> str:
    """Return the path of the user's kubectl. Raises AccessError."""
    found = shutil.which("kubectl")
    if found is None:
        raise AccessError("kubectl is not on the PATH. Install it, or correct the PATH.")
    return found


def _namespace_of_context(target: Target) -> str:
    command = [kubectl(), "config", "view", "--minify", "--output=jsonpath={..namespace}", *target.options()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=START_S, check=False)
    except subprocess.TimeoutExpired:
        raise AccessError(
            f"`kubectl config view` has not ended within {START_S:.0f} s. Check that the kubeconfig's file can be read."
        ) from None
    except OSError as error:
        raise AccessError(
            f"kubectl cannot be started ({error.strerror}). Install it again, or correct the PATH."
        ) from None
    if done.returncode != 0:
        raise AccessError(f"The kubeconfig cannot be used: {_sentence(done.stderr, done.returncode)}")
    return done.stdout.strip() or "default"


@contextlib.contextmanager
def _proxy(target: Target) -> Iterator[SocketRoute]:
    """Yield the route through a kubectl proxy that ends with this process. Raises AccessError."""
    program = kubectl()
    with tempfile.TemporaryDirectory(prefix="regroup-", dir=_short_directory()) as directory:  # mode 0700
        path = os.path.join(directory, "api")
        terminal = "/dev/tty" if sys.stdin is not None and sys.stdin.isatty() else os.devnull
        command = [
            "sh",
            "-c",
            _GUARD,
            "sh",
            terminal,
            directory,
            program,
            "proxy",
            f"--unix-socket={path}",
            *target.options(),
        ]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        except OSError as error:
            raise AccessError(
                f"kubectl proxy cannot be started ({error.strerror}). Check that there is a sh."
            ) from None
        with process:
            errors = _Errors(process.stderr)
            try:
                _await_start(process, errors)
                yield SocketRoute(path, errors.last)
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()  # of the shell: kubectl has been told to end
                    process.wait()


def _await_start(process: subprocess.Popen[str], errors: _Errors) -> None:
    """Wait until kubectl says that it serves. Raises AccessError."""
    assert process.stdout is not None
    assert process.stdin is not None
    late = threading.Timer(START_S, process.stdin.close)  # the shell then ends kubectl
    late.start()
    line = process.stdout.readline()
    late.cancel()
    if not line.startswith("Starting to serve"):
        errors.thread.join(1.0)
        said = errors.last() or f"it printed {line.strip()[:100]!r} within {START_S:.0f} s"
        raise AccessError(f"kubectl proxy did not start: {said.removeprefix('error: ')}")


class _Errors:
    """Reads what kubectl writes to its standard error. A login that asks the user something must be seen at once."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self._kept: deque[str] = deque(maxlen=5)
        self._stream = stream
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self._stream:
            if line.startswith("error:") or _KLOG.match(line):
                self._kept.append(line.strip())
            else:
                sys.stderr.write(line)
                sys.stderr.flush()

    def last(self) -> str:
        """Return the last error of kubectl, or an empty text."""
        return self._kept[-1] if self._kept else ""


def _short_directory() -> str | None:
    """Return a directory for temporary files in which the path of a socket is short enough; None: the usual one."""
    longest = os.path.join(tempfile.gettempdir(), "regroup-12345678", "api")
    return None if len(longest.encode()) <= _LONGEST_SOCKET else "/tmp"


def _sentence(said: str, code: int) -> str:
    text = said.strip().removeprefix("error: ")
    return text.splitlines()[-1] if text else f"kubectl ended with {code}."
