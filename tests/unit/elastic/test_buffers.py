"""Running statistics: a step that is redone changes them once."""

import torch

from regroup.elastic.buffers import Buffers


def test_redone_step_changes_running_statistics_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    once.load_state_dict(model.state_dict())
    batch = torch.randn(8, 4)
    buffers = Buffers(model)

    buffers.keep()
    assert not buffers.changed()
    model(batch)
    assert buffers.name_of_changed() == "1.running_mean"
    buffers.restore()
    assert not buffers.changed()
    model(batch)
    once(batch)

    for (name, got), (_, want) in zip(model.named_buffers(), once.named_buffers()):
        assert torch.equal(got, want), name
