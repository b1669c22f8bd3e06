"""A CNN for handwritten digits with Horovod's API, as in Horovod's own MNIST example, on data that ships with scikit-learn.

Nothing of Horovod is installed: `regroup run --framework Horovod` and `spec.framework: Horovod` give `horovod.torch`.
"""

import argparse
import os
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True, help="file that rank 0 writes and all ranks read")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
parser.add_argument("--batch-size", type=int, default=64, help="samples of one process in a step")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
parser.add_argument("--pace", type=float, default=0.0, help="seconds added to each step, to have time to watch")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
device = "cpu"
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = "cuda"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = torch.nn.Linear(32 * 2 * 2, 64)
        self.fc2 = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train = torch.utils.data.TensorDataset(images[order[:1437]], labels[order[:1437]])
held_out = images[order[1437:]].to(device), labels[order[1437:]].to(device)
sampler: torch.utils.data.DistributedSampler[object] = torch.utils.data.DistributedSampler(
    train, hvd.size(), hvd.rank()
)
loader = torch.utils.data.DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)

step = 0
if hvd.rank() == 0 and os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
for group in optimizer.param_groups:
    group["lr"] = args.lr * hvd.size()  # the checkpoint may be of another number of processes
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
step = hvd.broadcast_object(step, root_rank=0)
print(f"process {hvd.rank()} of {hvd.size()} begins at step {step}", flush=True)

while step < args.steps:
    sampler.set_epoch(step)
    for data, target in loader:
        if step == args.steps:
            break
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.pace)
        if step % 10 == 0 and hvd.rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if step % args.every == 0 and hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)  # a kill leaves the old file or the new one

model.eval()
with torch.no_grad():
    right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
accuracy = hvd.allreduce(right, name="accuracy")
if hvd.rank() == 0:
    print(f"held-out accuracy {accuracy.item():.3f} after {step} steps", flush=True)
hvd.shutdown()
