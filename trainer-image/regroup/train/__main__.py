"""`python -m regroup.train CONFIG.yaml`, which a job's command, `regroup run` and `regroup train` run."""

import sys

from regroup.train.command import main

if __name__ == "__main__":
    sys.exit(main())
