"""Experiments that have a script for one chip and one for several: their options and their steps."""
