"""What `python -m regroup.train` runs, as a file: the tests' zygote runs files. TEST_ARGUMENTS: its arguments, a line each."""

import os
import sys

from regroup.train.command import main

arguments = os.environ.get("TEST_ARGUMENTS")
sys.exit(main(arguments.splitlines() if arguments else None))
