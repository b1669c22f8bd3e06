"""The stage of pods: which pods there should be, and which are let go."""
