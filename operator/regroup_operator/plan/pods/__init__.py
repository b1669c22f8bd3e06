"""Fourth stage: which pods there should be, and which are let go."""
