"""What `python -m regroup.train` runs, as a file: the tests' zygote runs files."""

import sys

from regroup.train.command import main

sys.exit(main())
