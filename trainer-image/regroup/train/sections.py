"""The fields of a configuration by section, with their types, bounds and meanings. A configuration never changes.

`refusals` has the combinations that do not work, and `config` reads a file. docs/how-to/train.md lists every field.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from regroup.layout import DATA_DIMS


def named(value: Any) -> Any:
    """Return `{name: sgd}` for the short form `sgd` of a section."""
    return {"name": value} if isinstance(value, str) else value


Place = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Path of a file or a directory."""


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Digits(Section):
    """A perceptron on scikit-learn's handwritten digits, 1,797 images of 8 x 8."""

    name: Literal["digits"]
    width: int = Field(default=128, ge=1)
    """Width of the two hidden layers."""

    @property
    def parts(self) -> int:
        """Modules that a pipeline can cut between."""
        return 3


class Cnn(Section):
    """A convolutional network on the same digits, enlarged to the 28 x 28 of MNIST."""

    name: Literal["cnn"]
    width: int = Field(default=16, ge=8, multiple_of=8)
    """Channels of the first layer. The others have twice and four times as many."""

    @property
    def parts(self) -> int:
        return 4


HEADS, LAYERS, LENGTHS = {"tiny": 4, "gpt2": 12}, {"tiny": 4, "gpt2": 12}, {"tiny": 128, "gpt2": 1024}
"""Attention heads, layers, and default tokens in a sample, by `task.size`."""


class LanguageModel(Section):
    """GPT-2's architecture on tokens, predicting the next one."""

    name: Literal["language_model"]
    size: Literal["tiny", "gpt2"] = "tiny"
    """tiny: 4 layers of width 128, 0.8 million parameters. gpt2: GPT-2 124M."""
    length: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in a sample. Absent: 128 for tiny, 1024 for gpt2."""
    text: Place | None = None
    """Path of a text file, whose bytes become the tokens. Absent, without `tokens`: the source of Python's standard library."""
    tokens: Place | None = None
    """Path of a token file. It is made from `text` if it does not exist. Absent: tokens are kept in memory."""
    tied: bool = True
    """The output layer uses the embedding's weights. false: it has its own, which a pipeline needs."""
    experts: int | None = Field(default=None, ge=2)
    """Experts in place of each block's perceptron. Absent: one perceptron."""
    top_k: int = Field(default=1, ge=1)
    """Experts that compute a token, of `experts`."""

    @property
    def parts(self) -> int:
        """Modules that a pipeline can cut between: embedding, layers, output."""
        return LAYERS[self.size] + 2

    @property
    def heads(self) -> int:
        """Attention heads. The processes of `mesh.tensor` share them, and those of `mesh.context` with attention ulysses."""
        return HEADS[self.size]

    @property
    def sample_tokens(self) -> int:
        """Tokens in a sample."""
        return self.length or LENGTHS[self.size]


class Rounded(Section):
    """Gradients are rounded for the sum over processes."""

    name: Literal["fp16", "bf16"]
    """Format to which gradients are rounded."""


class PowerSgd(Section):
    """A low-rank approximation of each gradient is summed over processes. Its error is added to the next step's gradient."""

    name: Literal["powersgd"]
    rank: int = Field(default=1, ge=1)
    """Rank of the approximation. A larger one is more exact and slower."""
    start_step: int = Field(default=1000, ge=0)
    """Steps before this one sum gradients as they are."""
    min_compression: float = Field(default=2.0, ge=1)
    """A gradient is approximated only if that makes the message smaller by more than this factor."""


class Sgd(Section):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    learning_rate: float = Field(default=0.05, gt=0)
    """Rate after warm-up."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share of the last update that the next one repeats."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to weights with two or more dimensions, not to biases and norms."""


class AdamW(Section):
    """torch.optim.AdamW, fused."""

    name: Literal["adamw"]
    learning_rate: float = Field(default=3e-4, gt=0)
    """Rate after warm-up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to weights with two or more dimensions, not to biases and norms."""


class Constant(Section):
    """The rate stays after warm-up."""

    name: Literal["constant"]
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises linearly to `learning_rate`."""


class Decay(Section):
    """The rate falls from warm-up to the last step."""

    name: Literal["cosine", "linear"]
    """cosine: half a cosine wave. linear: a straight line."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises linearly to `learning_rate`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """The rate at the last step, as a fraction of `learning_rate`."""


class DataParallel(Section):
    """Each step applies the gradient of its whole batch, summed over the processes."""

    name: Literal["data_parallel"]
    uneven: bool = False
    """Processes that take longer for a microbatch get fewer of them."""
    algorithm: Literal["library", "ring"] = "library"
    """Algorithm that sums gradients. library: the all-reduce of gloo or NCCL. ring: Regroup's own, for comparison."""


class Mesh(Section):
    """Number of processes that hold one copy of the model together, by dimension of regroup.mesh(). 1: not split."""

    shard: int = Field(default=1, ge=1)
    """Processes that compute different samples and split every parameter (FSDP2)."""
    tensor: int = Field(default=1, ge=1)
    """Processes that compute the same samples, each its part of a layer."""
    pipeline: int = Field(default=1, ge=1)
    """Processes that compute the same samples, each some of the layers."""
    context: int = Field(default=1, ge=1)
    """Processes that compute the same samples, each its part of every sequence."""
    expert: int = Field(default=1, ge=1)
    """Processes that compute different samples and share out `task.experts`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order in which a process of a `pipeline` computes the microbatches of its layers."""
    reshard: bool = True
    """Parameters split by `shard` are split again after forward. false: after backward."""
    attention: Literal["ulysses", "ring"] = "ulysses"
    """Exchange for attention with `context`. ulysses: parts of the sequence for heads. ring: keys and values."""

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of regroup.mesh(): the dimensions along which the model is split, outermost first."""
        return {name: size for name in DIMENSIONS if (size := getattr(self, name)) > 1}


DIMENSIONS = ("pipeline", "shard", "tensor", "context", "expert")
"""Dimensions of the mesh, outermost first. The outer ones communicate least, since their processes may be far apart."""


class LocalSgd(Section):
    """Each process steps the optimizer by itself, and the parameters are averaged in each step."""

    name: Literal["local_sgd"]
    inner_steps: int = Field(default=10, ge=1)
    """Optimizer steps of each process in one step."""


class DiLoCo(Section):
    """Each process steps the optimizer by itself, and each step applies SGD with Nesterov momentum to the mean change."""

    name: Literal["diloco"]
    inner_steps: int = Field(default=10, ge=1)
    """Optimizer steps of each process in one step."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the step over all processes."""
    outer_momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum of the step over all processes."""


class ParameterServer(Section):
    """Processes push gradients to one of them and pull parameters from it, each at its own pace."""

    name: Literal["parameter_server"]
    staleness: int | None = Field(default=0, ge=0)
    """The oldest gradient that is applied, in steps. 0: synchronous. null: no bound."""
    shares_per_version: int | None = Field(default=None, ge=1)
    """Number of microbatches whose gradients make a step. Absent: those of a whole batch with staleness 0, else one."""
    computes: bool = True
    """The server and its standby compute gradients as well. false: they only serve."""

    def step_samples(self, microbatch: int, global_batch: int) -> int:
        """Return the number of samples in a step."""
        if self.shares_per_version is not None:
            return microbatch * self.shares_per_version
        return global_batch if self.staleness == 0 else microbatch


class RateScaling(Section):
    """Learning rates are multiplied by a factor that follows the batch, with `batch_per_rank`."""

    base_batch: int = Field(ge=1)
    """Samples in a step at which the factor is 1, so that `learning_rate` applies as it is."""
    rule: Literal["linear", "sqrt"] = "linear"
    """The factor is batch / base_batch, or its square root."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps in which the factor goes linearly to its new value after each change."""


class Fields(Section):
    """All fields of a configuration."""

    task: Annotated[Digits | Cnn | LanguageModel, Field(discriminator="name"), BeforeValidator(named)]
    """Model and data: digits, cnn or language_model."""
    steps: int = Field(ge=1)
    """Steps of the whole run, all epochs together."""
    global_batch: int | None = Field(default=None, ge=1)
    """Samples in a step over all processes. It stays the same at any number of processes."""
    batch_per_rank: int | None = Field(default=None, ge=1)
    """Samples in a step for each process, in place of `global_batch`. The batch follows the number of processes."""
    rate_scaling: RateScaling | None = None
    """Learning rates follow the batch, with `batch_per_rank`. Absent: they do not."""
    microbatch: int = Field(ge=1)
    """Samples in a forward pass. `global_batch` is a multiple of it, with at least one microbatch for each process."""
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """Seed of the first parameters and of the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    reduction: Literal["fast", "exact"] = "fast"
    """exact: the same parameters, bit by bit, at any number of processes; slower."""
    hook: Annotated[Annotated[Rounded | PowerSgd, Field(discriminator="name")] | None, BeforeValidator(named)] = None
    """Compression of gradients for the sum over processes: fp16, bf16 or powersgd. Absent: none."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of forward and backward, by torch.autocast. Parameters stay float32. float16 uses a GradScaler."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: backward computes each block again, which saves memory. selective: all but matrix products and attention."""
    compile: bool = False
    """Compile each block with torch.compile, and without a mesh the output layer with the loss. A worker compiles before it joins
    a running job."""
    optimizer: Annotated[Sgd | AdamW, Field(discriminator="name"), BeforeValidator(named)] = AdamW(name="adamw")
    """sgd or adamw."""
    schedule: Annotated[Constant | Decay, Field(discriminator="name"), BeforeValidator(named)] = Constant(
        name="constant"
    )
    """Course of the learning rate: constant, cosine or linear."""
    strategy: Annotated[
        DataParallel | LocalSgd | DiLoCo | ParameterServer, Field(discriminator="name"), BeforeValidator(named)
    ] = DataParallel(name="data_parallel")
    """Way in which processes share the work of a step: data_parallel, local_sgd, diloco or parameter_server."""
    mesh: Mesh | None = None
    """Processes that hold one copy of the model together. Absent: each process holds all of it."""
    max_norm: float | None = Field(default=None, gt=0)
    """Norm to which the gradient is clipped. Absent: no clipping."""
    noise_scale: bool = False
    """Measure the gradient noise scale, and print it with the loss."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations on held-out data. The last step is always evaluated. Absent: only the last one."""
    print_every: int = Field(default=100, ge=1)
    """Steps between two lines of loss, gradient norm and learning rate."""
    tensorboard: Place | None = None
    """Directory for TensorBoard's files. Absent: none are written."""
    histograms_every: int | None = Field(default=None, ge=1)
    """Steps between two histograms of each parameter and gradient, with tensorboard. Absent: none."""
    profile_at: int | None = Field(default=None, ge=1)
    """First of three steps that a profiler records, with tensorboard. Absent: none."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step; with `batch_per_rank` that of one process."""
        return (self.global_batch or self.batch_per_rank or 0) // self.microbatch

    @property
    def most_processes(self) -> int | None:
        """Largest number of processes that have work in a step; None: any number."""
        if self.global_batch is None:
            return None
        sizes = self.mesh.sizes if self.mesh is not None else {}
        computed_alike = math.prod(size for name, size in sizes.items() if name not in DATA_DIMS)
        return self.num_microbatches * computed_alike
