"""Measuring the losses beside the floor of the same card and beside other ways to compute them; ``autosp bench``."""
