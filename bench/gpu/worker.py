"""One part, in a process of its own: `python -m bench.gpu.worker PART DIRECTORY BOUND_S`. Started by `bench.gpu`.

Prints each row as a line of JSON. Prints nothing else, so that the pipe has only rows; a traceback goes to stderr, which is a log.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench.gpu import machine
from bench.gpu.part import Context, Row
from bench.gpu.parts import PARTS
from bench.trials import BenchError


def main() -> int:
    """Run the part; what it cannot measure is a row that fails."""
    name, directory, bound_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    ends_s = time.monotonic() + bound_s
    found = machine.from_json(json.loads((directory / "machine.json").read_text()))
    part = next(part for part in PARTS if part.name == name)

    def say(row: Row) -> None:
        print(json.dumps(row.to_json()), flush=True)

    try:
        part.run(Context(found, directory, ends_s), say)
    except BenchError as error:
        print(error, file=sys.stderr)
        say(Row(name, str(error).splitlines()[0][:300] + f" (logs: {directory})", "can be measured", holds=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
