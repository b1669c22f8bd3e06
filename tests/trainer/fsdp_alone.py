"""A script: one process of a model group of two with nobody to communicate with, whose forward or backward is cut off.

Its argument is what is in flight then. It prints the sum of the gradients that a loss of zero leaves afterwards.
"""

import sys
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import regroup
from regroup.errors import GroupBroken
from regroup.parallel import fsdp


class Ended(torch.distributed.Work):
    """A gather of a group that has ended."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Raise, as `Groups.wait` does."""
        raise GroupBroken("the group has ended")


mesh = regroup.mesh(shard=2)
torch.manual_seed(0)
model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
fsdp.sum_gradients(model)
model(torch.ones(2, 4)).sum().backward()  # torch knows its root from here on
model.zero_grad()
(group,) = model._get_fsdp_state()._fsdp_param_groups
if sys.argv[1] == "gather":
    model.unshard(async_op=True)
    group._all_gather_result = group._all_gather_result._replace(all_gather_work=Ended())
else:
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    assert any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params)
    model.set_requires_gradient_sync(True)
fsdp.begin_anew(model)
(0.0 * model(torch.ones(2, 4)).sum()).backward()
print("left:", sum(float(parameter.grad.to_local().abs().sum()) for parameter in model.parameters()))
