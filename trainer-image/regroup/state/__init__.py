"""What a process holds: `training` model, optimizer and further objects as one tree with a name; `durable` when it is written to
a checkpoint and read from one (`regroup.checkpoint` knows what that looks like on disk).
"""
