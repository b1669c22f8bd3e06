"""The parts that a person's machine needs to work with jobs: views of a job, its logs, and the way to the API server.

- `views.py` says what a client shows of a job: from its object, its pods and its events. The command line, the page and the
  Python client show the same.
- `log_lines.py` makes log lines readable and puts those of several workers in order.
- `log_streams.py` reads the logs of several workers at once, from anything that has them: `pod_logs.py` or `local_logs.py`.
- `jobs.py` says what can be done with a job. `cluster_jobs.py` does it in a cluster, and `local_jobs.py` on this machine.
- `errors.py` has the exceptions. Each message is one sentence for the user.
- `access.py` finds the way to the API server: `kubectl proxy` on a socket, or the service account of a pod.
- `api.py` has the requests: read, list, watch, stream, apply, patch, delete.
- `bundle.py` reads the files that travel with a job, and `submission.py` makes its objects. `creation.py` puts them into a cluster.
- `packages.py` resolves `--pip`, and `install_packages.py` installs in the pod.
- `pull.py` copies checkpoints from a job's volume, through the pod of `reader_pod.py`. `received.py` checks what comes.
- `client.py` is the Python client, and `arguments.py` checks what a program gives it. `place.py` has what it needs of a cluster
  and of this machine, and `local_runs.py` starts jobs of this machine.

They import the standard library only, because `kubectl regroup` is installed without further packages. A .gitignore needs pathspec.
Nothing here decides anything on a running job: the operator does, and the API server checks each change with the user's own rights.
"""

from regroup_client.client import Client, Job, Progress
from regroup_client.errors import ClientError, JobError, TimedOut
from regroup_client.log_lines import Line
from regroup_client.place import Options
from regroup_client.views import IncidentView, JobView, Point, WorkerView

__all__ = [
    "Client",
    "ClientError",
    "IncidentView",
    "Job",
    "JobError",
    "JobView",
    "Line",
    "Options",
    "Point",
    "Progress",
    "TimedOut",
    "WorkerView",
]
