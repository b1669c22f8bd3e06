"""What `python -m regroup.train` runs, as a file: the tests' zygote runs files.

TEST_ARGUMENTS  its arguments, a line each
TEST_NCCL       tensors go the way of those on a GPU, over gloo (gloo_for_nccl.py)
"""

import os
import sys

from regroup.train.command import main

if os.environ.get("TEST_NCCL"):
    from gloo_for_nccl import install  # type: ignore[import-not-found]  # it lies beside this script

    install()
arguments = os.environ.get("TEST_ARGUMENTS")
sys.exit(main(arguments.splitlines() if arguments else None))
