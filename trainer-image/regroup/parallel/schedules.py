"""The order in which a process of a pipeline computes its stages' microbatches. Pure.

The orders are those of torch.distributed.pipelining (GPipe, 1F1B, interleaved 1F1B, zero bubble 1P), except that any number of
microbatches fits. A last round that is not full is scheduled as a whole one, and the missing microbatches are left out. That leaves
the order of the others as it is. A session's number of microbatches follows the number of model groups, so it may be any.
`pipeline` executes an order. Why torch does not: docs/design/adr/0038-pipelines.md.
"""

from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = "gpipe", "1f1b", "interleaved", "zero_bubble"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Kinds of actions for a microbatch: forward; backward, whole, or cut into that of the stage's input and that of its parameters."""


class Action(NamedTuple):
    """One microbatch in one stage. Stages are counted over the whole model, microbatches from 0 within a step."""

    kind: str
    stage: int
    microbatch: int


def order(schedule: str, rank: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return what a rank of a pipeline does in a step. It has `num_chunks` stages: rank, rank + num_ranks, and so on.

    Microbatches go through each stage in order, forward and backward.
    """
    rounds = -(-num_microbatches // num_ranks)
    total = rounds * num_ranks * num_chunks
    """Forward passes of this rank, those that will be left out among them."""
    if schedule == GPIPE:
        warmup = total
    elif num_chunks == 1 or schedule == ZERO_BUBBLE:
        warmup = (num_chunks - 1) * num_ranks + num_ranks - 1 - rank
    else:
        warmup = (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
    warmup = min(warmup, total)

    def at(kind: str, number: int) -> Action:
        """Return the pass number `number` of its kind: `num_ranks` microbatches of a stage, then as many of the next one."""
        turn, place = divmod(number, num_ranks)
        turn_of_all, chunk = divmod(turn, num_chunks)
        if kind != FORWARD:
            chunk = num_chunks - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, turn_of_all * num_ranks + place)

    backward = INPUT if schedule == ZERO_BUBBLE else BACKWARD
    actions = [at(FORWARD, number) for number in range(warmup)]
    for number in range(total):
        if warmup + number < total:
            actions.append(at(FORWARD, warmup + number))
        actions.append(at(backward, number))
        if schedule == ZERO_BUBBLE and number >= rank:
            actions.append(at(WEIGHT, number - rank))
    if schedule == ZERO_BUBBLE:
        actions += [at(WEIGHT, number) for number in range(max(0, total - rank), total)]
    return tuple(one for one in actions if one.microbatch < num_microbatches)


def balanced(weights: list[int], num_parts: int) -> list[int]:
    """Return where each part begins when a row is cut into `num_parts`, none of them empty, so that the heaviest is as light as
    possible. There are at least as many weights as parts."""
    size = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[tuple[int, list[int]]] = [(sums[end], [0]) for end in range(size + 1)]
    """For each end of the row so far, the weight of its heaviest part and the beginnings of the parts."""
    for parts in range(2, num_parts + 1):
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut]) for cut in range(parts - 1, end)),
                default=(sums[size] + 1, []),
            )
            for end in range(size + 1)
        ]
    return best[size][1]
