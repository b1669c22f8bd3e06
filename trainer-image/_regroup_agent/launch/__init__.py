"""The command and the environment that trainer processes are started with.

Belongs here: reading the pod's command, and the functions that make a process's arguments and environment. Starting processes does
not belong here (`trainers`, `zygote`).
"""
