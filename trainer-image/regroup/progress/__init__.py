"""The reports of a session to its agent.

`reporter` sends the progress of the job, `pace` measures its speed, and `breakdown` averages the parts of a step's time. `busy`
announces activities that take longer than a step.
"""
