"""Planners: each a file that can be read next to its page of the paper, joined in :mod:`recoup.planners.registry`."""
