"""The streams of a GPU on which the gradients of one backward come: FSDP2 sums them inside the group on a stream of its own."""

import contextlib
from collections.abc import Iterator

import torch


class Streams:
    """The streams of a device. On a CPU there are none, and nothing is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[torch.cuda.Stream] = []

    def begin(self) -> None:
        """Forget them: a step begins."""
        self._seen = []

    def note(self) -> None:
        """Note that a gradient has come on the current stream."""
        if self._device.type == "cuda" and (current := torch.cuda.current_stream(self._device)) not in self._seen:
            self._seen.append(current)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let the block read all gradients that have come: the current stream waits for the others, and they for the block.

        The others wait because a gradient's memory is theirs: once the block has dropped it, they give it to what they run next.
        """
        if not self._seen:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        others = [stream for stream in self._seen if stream != current]
        for stream in others:
            current.wait_stream(stream)
        yield
        for stream in others:
            stream.wait_stream(current)
