"""Weights through files in a directory that trainer and workers share."""
