"""Frozen records that the operator's rooms share, and the ports between them.

Records that more than one room reads belong here (Pod, AgentSession, the plan's actions). So do the Protocols through which the
controller meets a cluster or local processes. These do not: decisions (plan/), wire messages (regroup.protocol), I/O.
"""
