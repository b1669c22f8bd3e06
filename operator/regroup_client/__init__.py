"""The parts that a person's machine needs to work with jobs: views of a job, and its logs. Standard library only.

- `views.py` says what a client shows of a job: from its object, its pods and its events. The command line, the page and the
  Python client show the same.
- `log_lines.py` makes log lines readable and puts those of several workers in order.
- `log_streams.py` reads the logs of several workers at once, from anything that has them.

Nothing here decides anything: the operator does, and the API server checks each change.
"""
