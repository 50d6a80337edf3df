"""Runs of many jobs on a testbed, compared by policy."""
