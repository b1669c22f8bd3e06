"""Regroup: training jobs that neither stop nor lose work."""
