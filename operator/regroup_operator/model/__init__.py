"""Frozen records that the operator's rooms share, and the ports between them.

Belongs here: what more than one room reads (Pod, Session, the plan's actions) and the Protocols through which the
controller meets a cluster or local processes. Does not: decisions (plan/), wire messages (regroup.protocol), I/O.
"""
