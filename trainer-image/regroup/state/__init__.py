"""The state that a process holds, and its tiers.

`training` has model, optimizer and further objects as one tree with a name. `memory` copies the tree to memory that outlives the
process, in `slots`. `durable` decides when `regroup.checkpoint` writes and reads it on a volume. `optimizers` and `rates` adapt the
script's optimizers.
"""
