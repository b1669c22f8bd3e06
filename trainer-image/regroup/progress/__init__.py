"""What the agent is told: `reporter` how far the job is, `pace` how fast it goes, `busy` what takes longer
than a step, `breakdown` where the time of a step goes."""
