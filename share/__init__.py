"""Marks this directory as package data (see setup.cfg); it holds no Python code."""
