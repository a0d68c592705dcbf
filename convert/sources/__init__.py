"""Readers of published checkpoints, one per format, all behind `Source`."""
