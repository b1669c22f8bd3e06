"""`regroup.train` with torch's profiler around some of its steps: TRACE FIRST NUMBER, then the arguments of `regroup train`.

Steps are those of the optimizer. The trace goes from the end of one to the end of another, so each step in it is whole. The file
appears when it is complete.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from regroup.train import command

trace, first, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
of = torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
profile = torch.profiler.profile(activities=[of])  # what the host does is not recorded: that would slow it down
done = 0


def stepped(*_: Any) -> None:
    global done
    done += 1
    if done == first:
        profile.start()
    elif done == first + number:
        profile.stop()
        profile.export_chrome_trace(str(trace) + ".tmp")
        Path(str(trace) + ".tmp").rename(trace)


register_optimizer_step_post_hook(stepped)
sys.exit(command.main(sys.argv[4:]))
