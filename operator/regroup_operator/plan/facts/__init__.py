"""The stage of facts: the newest generation, how each worker stands in it, its progress. It decides nothing."""
